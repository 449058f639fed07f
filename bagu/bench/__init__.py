"""Benchmarks of ops, training, the engine and the server, beside peers in the same run; the tables made of them."""
