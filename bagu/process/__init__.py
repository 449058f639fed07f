"""Process data: from a table to a model, its honest intervals, and settings that one may trust, or a refusal."""
