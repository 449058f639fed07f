"""The kernels of paged attention: a program computes a tile of queries over a range of keys; join.py joins them.

The rows of a tile are the query heads of one key head, for one or several tokens of one sequence, so that keys and
values are read once for all of them. A decode has one token per tile. The keys may be split into ranges of a fixed
length with one program each, which fills a GPU if there are few sequences. The online softmax is that of attention's
forward kernel, and so are the scores (attention/score_kernels.py).

The key heads of a tile are neighbours in the grid, and decodes start in the order of the tables: longest first is best.
The loop loads the table entries of the next keys while it computes: keys then depend on no load of the same iteration,
and Triton has two tiles of them in flight. On an H200, with blocks of 16, 0.94 of copy bandwidth for 256 sequences of
100 to 2,000 tokens (0.99 longest first), 0.93 for 32 x 4,096 and 0.92 for 4 x 32,768.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bagu.ops.attention.score_kernels import LN2, LOG2E, score
from bagu.ops.paged_attention.byte_planes import planes


@triton.jit
def sequence_of(cu_ptr, tile, sequences, TOKENS: tl.constexpr):
    """The sequence of a tile. Sequence s has the tiles from cu[s] // TOKENS + s on, at least as many as it needs."""
    low, high = 0, sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _load_keys(
    ptr, block, place, g, there, block_stride, row_stride, head_stride, FEATURES: tl.constexpr, WIDTH: tl.constexpr
):
    """[N, WIDTH]: one head of row `place` of each `block`, zeros where a key is not `there`."""
    c = tl.arange(0, WIDTH)
    inside = (place * row_stride + g * head_stride)[:, None] + c[None, :]
    at = (ptr + block.to(tl.int64) * block_stride)[:, None] + inside
    real = there[:, None]
    if FEATURES < WIDTH:  # a mask by column costs registers
        real = real & (c < FEATURES)[None, :]
    return tl.load(at, real, 0.0)


@triton.jit
def _load_scales(ptr, block, place, g, there, block_stride, row_stride, head_stride):
    """[1, N]: the scales of one head of the same rows."""
    at = block.to(tl.int64) * block_stride + place * row_stride + g * head_stride
    return tl.load(ptr + at, there, 0.0)[None, :]


@triton.jit
def _mix(mixed, kept, p, v, FP8: tl.constexpr, ACC: tl.constexpr):
    """mixed * kept + p v, where v is [N, EW] or words of four features (byte_planes.py)."""
    if len(mixed) == 1:
        return (tl.dot(p, v.to(p.dtype), mixed[0] * kept, input_precision="ieee", out_dtype=ACC),)
    else:
        v = planes(v, p.dtype, FP8)
        return (
            tl.dot(p, v[0], mixed[0] * kept, input_precision="ieee", out_dtype=ACC),
            tl.dot(p, v[1], mixed[1] * kept, input_precision="ieee", out_dtype=ACC),
            tl.dot(p, v[2], mixed[2] * kept, input_precision="ieee", out_dtype=ACC),
            tl.dot(p, v[3], mixed[3] * kept, input_precision="ieee", out_dtype=ACC),
        )


@triton.jit(do_not_specialize=["sequences", "groups", "T", "H", "per_group", "window", "range_tiles", "columns"])
def paged_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, cu_ptr, lengths_ptr, slopes_ptr, sinks_ptr, k_scale_ptr, v_scale_ptr, out_ptr,
    lse_ptr, sequences, groups, T, H, per_group, window, scale_high, scale_low, table_stride, q_stride, q_head_stride,
    k_block_stride, k_row_stride, k_head_stride, v_block_stride, v_row_stride, v_head_stride, k_scale_block_stride,
    k_scale_row_stride, k_scale_head_stride, v_scale_block_stride, v_scale_row_stride, v_scale_head_stride, range_tiles,
    columns,
    B: tl.constexpr, D: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr,
    DW: tl.constexpr, EW: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, ONE: tl.constexpr,
    WINDOW: tl.constexpr, FAR: tl.constexpr, WORDS: tl.constexpr, FP8: tl.constexpr, ACC: tl.constexpr,
    EARLY: tl.constexpr, NEXT: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_wait()
    if NEXT:
        gdc_launch_dependents()
    tile, g, split = tl.program_id(0) // groups, tl.program_id(0) % groups, tl.program_id(1)
    s, block = tile, 0
    if not ONE:  # the tiles of a sequence are numbered from its first; the last of them attend to the most keys
        tile = tl.num_programs(0) // groups - 1 - tile
        s = sequence_of(cu_ptr, tile, sequences, TOKENS)
        block = tile - (tl.load(cu_ptr + s) // TOKENS + s)
    begin = tl.load(cu_ptr + s)
    new = tl.load(cu_ptr + s + 1) - begin
    context = new
    if lengths_ptr is not None:
        context = tl.load(lengths_ptr + s)
    first, n = 0, tl.arange(0, N)
    if SPLITS:
        first = split * range_tiles * N  # a multiple of N, which the compiler uses
    if ONE and tables_ptr is not None:
        table_ptr = tables_ptr + s.to(tl.int64) * table_stride
        # Loaded before the lengths are known: one load less to wait for at the start. Unused entries may be any number.
        # Chunks have no registers left for that.
        next_block = tl.load(table_ptr + (first + n) // B, (first + n) // B < columns, 0)
    if block * TOKENS >= new:
        return
    M: tl.constexpr = TOKENS * HEADS
    r = tl.arange(0, M)
    token, head = block * TOKENS + r // HEADS, r % HEADS  # of the sequence's new tokens, of the key head's query heads
    real = (token < new) & (head < per_group)
    i, h, row = context - new + token, (g * per_group + head).to(tl.int64), (begin + token).to(tl.int64)
    into = (split * T.to(tl.int64) + row) * H + h  # [splits, T, H]

    lowest = context - new + block * TOKENS  # the position of the tile's first query
    end, needed = tl.minimum(lowest + TOKENS, context), 0
    if SPLITS:
        end = tl.minimum(end, first + range_tiles * N)
    if WINDOW:  # keys before the first query's window are not read: their blocks may be released
        needed = tl.maximum(lowest - window + 1, 0)
        first = tl.maximum(first, needed // N * N)
    SINKS: tl.constexpr = sinks_ptr is not None
    if SPLITS:  # noqa: SIM102  (a constant outside, a value inside)
        if (first >= end) & ((not SINKS) | (split > 0)):  # no key: join_kernel reads no values of this range
            tl.store(lse_ptr + into, tl.full([M], float("-inf"), ACC), real)
            return

    ALIBI: tl.constexpr = slopes_ptr is not None
    q_at, c = row * q_stride + h * q_head_stride, tl.arange(0, DW)
    q = tl.load(q_ptr + q_at[:, None] + c[None, :], real[:, None] & (c < D)[None, :], 0.0)
    scale = tl.full([], 1.0, ACC) * scale_high + scale_low  # a kernel receives floats as fp32; fp64 needs the rest
    slope = tl.zeros([M, 1], ACC)
    if ALIBI:
        slope = (tl.load(slopes_ptr + h, real, 0.0).to(ACC) * LOG2E)[:, None]
    top, total = tl.full([M], float("-inf"), ACC), tl.zeros([M], ACC)
    VW: tl.constexpr = EW // WORDS  # columns of a tile of values; WORDS is 4 or 1
    mixed = (tl.zeros([M, VW], ACC),)
    if WORDS == 4:
        mixed = (  # type: ignore[assignment]  # a tuple's length is part of its type in Triton too
            tl.zeros([M, VW], ACC),
            tl.zeros([M, VW], ACC),
            tl.zeros([M, VW], ACC),
            tl.zeros([M, VW], ACC),
        )
    if SINKS:  # noqa: SIM102
        if split == 0:  # a first score with no value
            top = tl.load(sinks_ptr + h, real, 0.0).to(ACC) * LOG2E
            total += 1.0
    if FAR:  # an offset in a block of the pool needs 64 bits
        g = g.to(tl.int64)
    if tables_ptr is None:  # the keys are packed like the queries, in blocks of one
        next_block = begin + first + n
    elif WINDOW or not ONE:
        table_ptr = tables_ptr + s.to(tl.int64) * table_stride
        next_block = tl.load(table_ptr + (first + n) // B, (first + n >= needed) & (first + n < end), 0)
    for at in tl.range(first, end, N, num_stages=STAGES):
        j = at + n
        there = j < end
        if WINDOW:
            there = there & (j >= needed)
        source, place = next_block, j % B
        if FAR:
            place = place.to(tl.int64)
        if tables_ptr is None:
            next_block = begin + j + N
        else:
            next_block = tl.load(table_ptr + (j + N) // B, j + N < end, 0)
        k = _load_keys(k_ptr, source, place, g, there, k_block_stride, k_row_stride, k_head_stride, D, DW)
        product = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        if k_scale_ptr is not None:
            product *= _load_scales(
                k_scale_ptr, source, place, g, there, k_scale_block_stride, k_scale_row_stride, k_scale_head_stride
            )
        x = score(product, i[:, None], j[None, :], slope, scale, 1.0, False, False, ALIBI)
        if WINDOW:
            x = tl.where((j[None, :] <= i[:, None]) & (i[:, None] - j[None, :] < window), x, float("-inf"))
        elif ONE:  # a decode attends to every key that it reads
            x = tl.where(there[None, :], x, float("-inf"))
        elif at + N > lowest + 1:
            x = tl.where((j[None, :] <= i[:, None]) & (j < end)[None, :], x, float("-inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key so far: -inf - -inf is NaN
        kept = tl.exp2(top - base)
        p = tl.exp2(x - base[:, None])
        v = _load_keys(v_ptr, source, place, g, there, v_block_stride, v_row_stride, v_head_stride, E // WORDS, VW)
        top, total = higher, total * kept + tl.sum(p, 1)
        if v_scale_ptr is not None:
            p *= _load_scales(
                v_scale_ptr, source, place, g, there, v_scale_block_stride, v_scale_row_stride, v_scale_head_stride
            )
        mixed = _mix(mixed, kept[:, None], p.to(q.dtype), v, FP8, ACC)

    e, unit = WORDS * tl.arange(0, VW), 1.0 if SPLITS else LN2  # join_kernel takes logs of base 2
    tl.store(lse_ptr + into, (top + tl.log2(total)) * unit, real)
    total = tl.where(total == 0.0, 1.0, total)[:, None]  # a query without keys has out = 0, lse = -inf
    for w in tl.static_range(WORDS):
        at = out_ptr + into[:, None] * E + (e + w)[None, :]
        tl.store(at, mixed[w] / total, real[:, None] & (e + w < E)[None, :])
