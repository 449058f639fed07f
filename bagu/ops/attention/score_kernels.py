"""Code shared by the attention kernels: loading a tile of rows, and turning a product q . k into a score.

Scores are in base 2, s = log2(e) * (the spec's score), since exp2 is one instruction. The host computes `scale` and
`cap` accordingly (`triton_backend._scores`):

    without a cap    s = (q . k) * scale                 scale = log2(e) * (the spec's scale), cap = 1
    with a cap       s = tanh((q . k) * scale) * cap     scale = (the spec's scale) / softcap, cap = log2(e) * softcap

Positions i of queries and j of keys are relative to the segment's first token. i is a column and j a row, or the other
way round if a kernel has its scores transposed.
"""

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def work(tiles_ptr, equal=0, ROWS: tl.constexpr = 1):
    """This program's head and tile: the begin and length of its segment, and the block (work_list.py). Without a list,
    every segment has the length `equal`, and a block ROWS rows.

    Head and begin are 64-bit: a tensor may have more than 2^31 elements.
    """
    head, at = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if tiles_ptr is None:
        blocks = tl.cdiv(equal, ROWS)
        return head, (at // blocks).to(tl.int64) * equal, equal, at % blocks
    else:
        tile = tiles_ptr + 3 * at
        return head, tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)


@triton.jit
def constants(scale_high, scale_low, cap_high, cap_low, ACC: tl.constexpr):
    """`scale` and `cap` in ACC. A kernel receives floats as fp32; for fp64 the rest comes separately."""
    one = tl.full([], 1.0, ACC)
    return one * scale_high + scale_low, one * cap_high + cap_low


@triton.jit
def slope_of(slopes_ptr, head, ACC: tl.constexpr):
    """The ALiBi slope of a head, 0 without ALiBi."""
    slope = 0.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head).to(ACC) * LOG2E
    return slope


@triton.jit
def rows_of(
    ptr, begin, head, length, stride, head_stride, FEATURES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """One head of a segment's `length` rows, for `load_rows`: a pointer, or a TMA descriptor.

    A descriptor ends with the segment, so rows beyond the segment are read as zeros. Its 32-bit row index counts from
    the segment's begin. A descriptor must have at least one row.
    """
    first = ptr + begin * stride + head * head_stride
    if TMA:
        return tl.make_tensor_descriptor(first, [tl.maximum(length, 1), FEATURES], [stride, 1], [ROWS, WIDTH])
    else:
        return first


@triton.jit
def load_rows(
    source, at, length, stride, FEATURES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr
):
    """Rows at … at + ROWS - 1 of `rows_of`: [ROWS, WIDTH], zeros beyond the segment's end and beyond the features."""
    if TMA:
        return source.load([at, 0])
    else:
        r, c = tl.arange(0, ROWS), tl.arange(0, WIDTH)
        there = (at + r < length)[:, None] & (c < FEATURES)[None, :]
        return tl.load(source + (at + r).to(tl.int64)[:, None] * stride + c[None, :], there, 0.0)


@triton.jit
def heads_of(
    ptr, begin, head, heads, length, stride, head_stride, FEATURES: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Like `rows_of`, for `heads` heads starting at `head`; used with `load_head`."""
    first = ptr + begin * stride + head * head_stride
    if TMA:
        return tl.make_tensor_descriptor(
            first, [tl.maximum(length, 1), heads, FEATURES], [stride, head_stride, 1], [ROWS, 1, WIDTH]
        )
    else:
        return first


@triton.jit
def load_head(
    source, at, head, length, stride, head_stride, FEATURES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Like `load_rows`, for one head of `heads_of`."""
    if TMA:
        return source.load([at, head, 0]).reshape([ROWS, WIDTH])
    else:
        return load_rows(source + head * head_stride, at, length, stride, FEATURES, ROWS, WIDTH, TMA)


@triton.jit
def _tanh(x):
    """tanh by exp2. In fp32 below 1/8, by its series (relative error 2e-9), because 1 - e cancels there."""
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    high = (1.0 - e) / (1.0 + e)
    t = tl.where(x < 0, -high, high)
    if x.dtype == tl.float32:
        square = x * x
        low = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 - square * (17.0 / 315))))
        t = tl.where(tl.abs(x) < 0.125, low, t)
    return t


@triton.jit
def score(product, i, j, slope, scale, cap, RAW: tl.constexpr, CAP: tl.constexpr, ALIBI: tl.constexpr):
    """Turn products q . k into scores. With RAW, return the products; the caller multiplies them by `scale`."""
    if RAW:
        return product
    else:
        s = product * scale
        if CAP:
            s = _tanh(s) * cap
        if ALIBI:
            s -= slope * tl.abs(i - j)
        return s


@triton.jit
def cap_slope(product, scale):
    """The derivative of tanh at a capped score: 1 - tanh^2."""
    t = _tanh(product * scale)
    return 1.0 - t * t


@triton.jit
def keys_of(block, length, window, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """The range of keys of a block of M queries: the first key, the first key whose block needs a mask, the end.

    Every query of the block attends to the keys before `masked_from`. With a window, all blocks are masked.
    """
    first, masked_from, end = 0, length // N * N, length
    if CAUSAL:
        masked_from, end = block * M // N * N, tl.minimum(block * M + M, length)
    if WINDOW:
        first = tl.maximum(block * M - window + 1, 0) // N * N
        masked_from = first
        if not CAUSAL:
            end = tl.minimum(block * M + M - 1 + window, length)
    return first, masked_from, end


@triton.jit
def seen(i, j, length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether a query attends to a key. Queries beyond the segment's end are not masked, and not stored."""
    if CAUSAL:
        there = j <= i
    else:
        there = j < length
    if WINDOW:
        there = there & (i - j < window)
        if not CAUSAL:
            there = there & (j - i < window)
    return there
