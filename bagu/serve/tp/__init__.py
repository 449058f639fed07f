"""Serving by tensor parallelism: rank 0 has the engine, the other ranks run the model on the plans that it sends."""
