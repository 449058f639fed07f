"""Triton code that several ops share.

scalars       64-bit indices, 1 / N, 1 / sqrt(x)
rows          load, reduce and store a row that a program keeps in registers
column_sum    add the partial weight gradients of all programs
norms         RMSNorm, LayerNorm and ScaleNorm: one kernel forward, one backward
wide_norms    the same for rows that do not fit in registers
"""
