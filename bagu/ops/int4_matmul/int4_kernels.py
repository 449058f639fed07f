"""y = x wᵀ with a 4-bit weight: a program computes a tile of y over a range of the groups of K.

A byte has a value of the first half of a group's columns in its low half and one of the second half in its high half.
So a tile of bytes becomes two operands, and a group is two products, each with consecutive columns of x: no value moves
to another thread. The values less the zero point are small integers, exact in 16 bits; the sum of a group is multiplied
by its scale in fp32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

HALF: tl.constexpr = tl.constexpr(64)  # bytes of a group of 128


def _bytes_to_bf16() -> str:
    """PTX: 128 + the low halves of the four bytes of $4 as two pairs of bf16, $0 and $1, and the high ones, $2 and $3.

    bf16 has 7 bits of fraction, so 0x4300 | q is 128 + q. This is 8 instructions for 8 values; conversions of the
    values from integers are 14.
    """
    lines = [
        f"prmt.b32 t, $4, 0, {select:#x}; shr.u32 s, t, 4;"
        f" lop3.b32 ${i}, t, 0x000f000f, 0x43004300, 0xEA; lop3.b32 ${i + 2}, s, 0x000f000f, 0x43004300, 0xEA;"
        for i, select in enumerate((0x4140, 0x4342))
    ]
    return "{ .reg .b32 t, s; " + " ".join(lines) + " }"


BYTES_TO_BF16: tl.constexpr = tl.constexpr(_bytes_to_bf16())


@triton.jit
def _halves(packed, DTYPE: tl.constexpr):
    """The low and the high halves of bytes in DTYPE, and what was added to them."""
    if DTYPE.is_bf16():
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        low, high = tl.inline_asm_elementwise(
            BYTES_TO_BF16, "=r,=r,=r,=r,r", [packed], dtype=types, is_pure=True, pack=4
        )
        return low, high, 128.0
    elif DTYPE.is_fp16():
        low, high = (packed & 15).to(tl.int16) | 0x6400, (packed >> 4).to(tl.int16) | 0x6400  # 1024 + q
        return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True), 1024.0
    else:
        return (packed & 15).to(DTYPE), (packed >> 4).to(DTYPE), 0.0


@triton.jit(do_not_specialize=["M", "G", "per_part"])
def int4_kernel(
    x_ptr, packed_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr, M, N, P, G, per_part, x_stride, packed_stride,
    scales_row, scales_group, zeros_row, zeros_group, BM: tl.constexpr, BN: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr, SUMS: tl.constexpr, ACC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if EARLY:  # the programs of add_parts_kernel may start once every program of this kernel has
        gdc_launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    first = tl.program_id(2) * per_part
    last = tl.minimum(first + per_part, G)
    # tiles past the end read the last row again
    row, rows, j = tl.minimum(m, M - 1).to(tl.int64), tl.minimum(n, N - 1).to(tl.int64), tl.arange(0, HALF)
    total = tl.zeros([BM, BN], ACC)
    for g in tl.range(first, last, num_stages=STAGES):
        half = HALF if EVEN else tl.minimum(P - g * HALF, HALF)
        there, other = None if EVEN else (j < half)[None, :], None if EVEN else 0
        packed = tl.load(packed_ptr + rows[:, None] * packed_stride + g * HALF + j[None, :], there)
        scale = tl.load(scales_ptr + rows * scales_row + g * scales_group)
        at = x_ptr + row[:, None] * x_stride + 2 * g * HALF + j[None, :]
        x_low, x_high = tl.load(at, there, other), tl.load(at + half, there, other)
        low, high, added = _halves(packed, DTYPE)
        if zeros_ptr is None:
            low, high = low - (added + 8.0), high - (added + 8.0)
        else:
            zero = tl.load(zeros_ptr + rows * zeros_row + g * zeros_group)
            zero = (zero.to(SUMS) + added).to(DTYPE)[:, None]
            low, high = low - zero, high - zero
        part = tl.dot(x_low, low.to(DTYPE).T, input_precision="ieee", out_dtype=SUMS)
        part = tl.dot(x_high, high.to(DTYPE).T, part, input_precision="ieee", out_dtype=SUMS)
        total += part.to(ACC) * scale.to(ACC)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, n < N, 0.0).to(ACC)[None, :]
    at = (tl.program_id(2) * M.to(tl.int64) + m)[:, None] * N + n[None, :]
    tl.store(y_ptr + at, total, (m < M)[:, None] & (n < N)[None, :])


@triton.jit
def add_parts_kernel(
    parts_ptr, bias_ptr, y_ptr, size, N, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """y = bias + the sum of parts [PARTS, M, N], added in their order."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        gdc_wait()
    total = tl.load(parts_ptr + i, i < size, 0.0)
    for p in tl.static_range(1, PARTS):
        total += tl.load(parts_ptr + p * size + i, i < size, 0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + i % N, i < size, 0.0)
    tl.store(y_ptr + i, total, i < size)
