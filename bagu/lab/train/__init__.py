"""Labs about training: optimizers, batches, memory, data."""
