"""Triton code that several ops share, and the host code around it.

early         dependent launches: kernels that start before the previous one has ended
launch        host code: row views, accumulators, grid sizes, the GPU's generation (`is_hopper`, `starts_early`)
scalars       64-bit indices, 1 / N, 1 / sqrt(x)
rows          load, reduce and store a row that a program keeps in registers
column_sum    add the partial weight gradients of all programs
norms         RMSNorm, LayerNorm and ScaleNorm: one kernel forward, one backward
wide_norms    the same for rows that do not fit in registers
gated_kernels act(gate) * up, forward and backward
gemm, products, quantize   tiles of matrix products, products of few rows, rounding to int8 and fp8
"""
