"""Decoding on a CPU: a step as one call of C++ for the models that match it; int8 weights."""
