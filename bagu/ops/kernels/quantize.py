"""Quantization in kernels: the scale of a group of numbers, and the numbers divided by it, in int8 or fp8.

- |x| is compared as an integer (its bits without the sign), where NaN is above infinity and so survives a maximum;
- for int8, x * (1 / scale) is added to 1.5 * 2^23, where the spacing of fp32 is 1: the sum is rounded to nearest even,
  and its low byte is the result in two's complement (1.5 * 2^52 in fp64).
"""

import triton
import triton.language as tl


@triton.jit
def magnitude(x, ACC: tl.constexpr):
    """|x| as an integer with the same order."""
    x = x.to(ACC)
    if x.dtype.is_fp64():
        bits = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
    else:
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def scale_of(top, LARGEST: tl.constexpr, ACC: tl.constexpr):
    """The scale that maps a group's largest `magnitude` to LARGEST; 0 if it would be below 2^-126."""
    scale = top.to(ACC, bitcast=True) / LARGEST
    return tl.where(scale < 1.1754943508222875e-38, 0.0, scale)


@triton.jit
def inverse_of(scale):
    """1 / scale; 0 if the scale is 0, infinite or NaN."""
    return 1.0 / tl.where(scale > 0.0, scale, float("inf"))


@triton.jit
def quantized(x, inverse, DTYPE: tl.constexpr, ACC: tl.constexpr):
    """x * inverse as int8 or fp8; 0 for any x if the inverse is 0 (the low byte of a GPU's NaN is 255)."""
    steps = x.to(ACC) * inverse
    if DTYPE.is_floating():
        return tl.where(inverse > 0.0, steps, 0.0).to(tl.float32).to(DTYPE)
    else:
        if steps.dtype.is_fp64():
            q = (steps + 6755399441055744.0).to(tl.int64, bitcast=True)
        else:
            q = (steps + 12582912.0).to(tl.int32, bitcast=True)
        return tl.where(inverse > 0.0, q, 0).to(tl.int8)
