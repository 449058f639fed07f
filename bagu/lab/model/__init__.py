"""Labs about the model: attention, positions, norms, counts of operations."""
