"""Labs about scores: prompts, contamination, noise."""
