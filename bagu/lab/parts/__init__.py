"""What several labs share: small models, timing, statistics."""
