"""Benchmarks of ops, training, the engine and the server, with peers in the same run."""
