"""Decoding on a CPU: a step as one C++ call for supported models; int8 weights."""
