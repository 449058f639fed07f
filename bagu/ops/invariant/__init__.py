"""Batch-invariant ops: the mode (mode.py), and the C++ that computes a row by itself on a CPU (invariant_rows.cpp)."""
