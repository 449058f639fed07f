"""The kernel of MLA attention: a program computes a tile of query heads over a range of a sequence's latents.

The rows of a tile are query heads, of one token or of several tokens of one sequence. A tile of the cache is loaded to
shared memory once and is both the key and the value. It is two tensors, the latent [N, EW] and the rotated key [N, RW],
because a tile's width is a power of two: 512 + 64 features would be a tile of 1,024. Tiles of more heads than a program
has rows are neighbours in the grid, so that all but one of them read the cache from L2. Ranges of keys, and the kernel
that joins their results, are those of paged attention.
"""

import triton
import triton.language as tl

from bagu.ops.attention.score_kernels import LN2
from bagu.ops.paged_attention.paged_kernels import sequence_of


@triton.jit(do_not_specialize=["sequences", "T", "H", "groups", "window"])
def mla_kernel(
    q_ptr, cache_ptr, tables_ptr, cu_ptr, lengths_ptr, out_ptr, lse_ptr, sequences, T, H, groups, window, scale_high,
    scale_low, table_stride, q_stride, q_head_stride, block_stride, row_stride, B: tl.constexpr, E: tl.constexpr,
    R: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, EW: tl.constexpr, RW: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr, WINDOW: tl.constexpr, LARGE: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    tile, group = tl.num_programs(0) // groups - 1 - tl.program_id(0) // groups, tl.program_id(0) % groups
    split = tl.program_id(1)
    s, block = tile, 0
    if not ONE:  # the tiles of a sequence are numbered from its first; the last of them attend to the most keys
        s = sequence_of(cu_ptr, tile, sequences, TOKENS)
        block = tile - (tl.load(cu_ptr + s) // TOKENS + s)
    begin, context = tl.load(cu_ptr + s), tl.load(lengths_ptr + s)
    new = tl.load(cu_ptr + s + 1) - begin
    if block * TOKENS >= new:
        return
    M: tl.constexpr = TOKENS * HEADS
    r = tl.arange(0, M)
    token, h = block * TOKENS + r // HEADS, group * HEADS + r % HEADS
    real = (token < new) & (h < H)
    i, row = context - new + token, (begin + token).to(tl.int64)
    into = (split * T.to(tl.int64) + row) * H + h  # [splits, T, H]

    lowest = context - new + block * TOKENS  # the position of the tile's first query
    first, end, needed = split * SPLIT, tl.minimum(lowest + TOKENS, context), 0
    if SPLIT > 0:
        end = tl.minimum(end, first + SPLIT)
    if WINDOW:  # keys before the first query's window are not read: their blocks may be released
        needed = tl.maximum(lowest - window + 1, 0)
        first = tl.maximum(first, needed // N * N)
    if SPLIT > 0:  # noqa: SIM102  (a constant outside, a value inside)
        if first >= end:  # no key: join_kernel reads no values of this range
            tl.store(lse_ptr + into, tl.full([M], float("-inf"), ACC), real)
            return

    e, o, n = tl.arange(0, EW), tl.arange(0, RW), tl.arange(0, N)
    q_at = q_ptr + (row * q_stride + h * q_head_stride)[:, None]
    q = tl.load(q_at + e[None, :], real[:, None] & (e < E)[None, :], 0.0)
    q_rotated = tl.load(q_at + E + o[None, :], real[:, None] & (o < R)[None, :], 0.0)
    scale = tl.full([], 1.0, ACC) * scale_high + scale_low  # a kernel receives floats as fp32; fp64 needs the rest
    top, total, mixed = tl.full([M], float("-inf"), ACC), tl.zeros([M], ACC), tl.zeros([M, EW], ACC)
    table_ptr = tables_ptr + s.to(tl.int64) * table_stride
    for at in tl.range(first, end, N, num_stages=STAGES):
        j = at + n
        there = (j >= needed) & (j < end)
        page = tl.load(table_ptr + j // B, there, 0)
        if LARGE:  # 64-bit offsets take twice the registers, and the tile of 64 heads has none left
            page = page.to(tl.int64)
        place = page * block_stride + j % B * row_stride
        latent = tl.load(cache_ptr + place[:, None] + e[None, :], there[:, None] & (e < E)[None, :], 0.0)
        rotated = tl.load(cache_ptr + place[:, None] + (E + o)[None, :], there[:, None] & (o < R)[None, :], 0.0)
        x = tl.dot(q_rotated, rotated.T, input_precision="ieee", out_dtype=ACC)
        x = tl.dot(q, latent.T, x, input_precision="ieee", out_dtype=ACC) * scale
        seen = there[None, :]
        if not ONE:
            seen = seen & (j[None, :] <= i[:, None])
            if WINDOW:
                seen = seen & (i[:, None] - j[None, :] < window)
        x = tl.where(seen, x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: -inf - -inf is NaN
        kept = tl.exp2(top - base)
        p = tl.exp2(x - base[:, None])
        mixed = tl.dot(p.to(latent.dtype), latent, mixed * kept[:, None], input_precision="ieee", out_dtype=ACC)
        top, total = higher, total * kept + tl.sum(p, 1)

    unit = 1.0 if SPLIT > 0 else LN2  # join_kernel takes logs of base 2
    tl.store(lse_ptr + into, (top + tl.log2(total)) * unit, real)
    mean = mixed / tl.where(total == 0.0, 1.0, total)[:, None]  # a query without keys has out = 0, lse = -inf
    tl.store(out_ptr + into[:, None] * E + e[None, :], mean, real[:, None] & (e < E)[None, :])
