"""Speculative decoding: drafted tokens that one forward verifies together."""
