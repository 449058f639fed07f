"""Decoding on a CPU: a step as one call of C++, or in PyTorch; packed and quantized weights."""
