"""Tuned options of Triton kernels: a store of measurements (store.py), and the lookup of a call (lookup.py)."""
