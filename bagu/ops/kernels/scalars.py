"""Scalar helpers for kernels: 64-bit indices, 1 / N, 1 / sqrt(x)."""

import triton
import triton.language as tl


@triton.jit
def int64(i):
    """A loop counter as a 64-bit offset; in the interpreter a loop counter is a Python int without `.to`."""
    return tl.zeros([], tl.int64) + i


@triton.jit
def reciprocal(N, ACC: tl.constexpr):
    """1 / N in ACC, rounded to nearest. The division is slow, but it overlaps with the load of the row."""
    n = tl.zeros([], ACC) + N
    if n.dtype == tl.float32:
        return tl.div_rn(1.0, n)
    else:
        return 1.0 / n


@triton.jit
def rsqrt(x):
    """1 / sqrt(x) within an ulp: tl.rsqrt is up to 2 ulps off, and a Newton step corrects it.

    A correctly rounded division here costs LayerNorm a tenth of its speed on an H200: every row waits for it.
    """
    if x.dtype == tl.float32:
        r = tl.rsqrt(x)
        return tl.where((x > 0.0) & (x < float("inf")), r + r * (0.5 - 0.5 * (x * r) * r), r)
    else:
        return 1.0 / tl.sqrt(x)
