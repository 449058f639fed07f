"""The list of tiles of a batch, longest work first, built on the device: no length is copied to the host.

A tile is a block of rows of one segment, as (the segment's begin, its length, the block). Tiles of equal work form a
level: level l has one tile of every segment with more than l blocks. For blocks of queries it is block l, which attends
to l + 1 blocks of keys under a causal mask; for blocks of keys it is block l counted from the segment's end. The host
knows an upper bound of the number of tiles; unused entries have length 0.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import next_power_of_2


@triton.jit(do_not_specialize=["segments", "tokens", "levels"])
def _list(
    cu_ptr, tiles_ptr, segments, tokens, levels, cu_stride, ROWS: tl.constexpr, FROM_END: tl.constexpr,
    SEGMENTS: tl.constexpr, LEFT_OVER: tl.constexpr,
):  # fmt: skip
    """Write the tiles of one level. Wrong offsets give wrong tiles, but none outside the tensors."""
    level, s = tl.program_id(0), tl.arange(0, SEGMENTS)
    begin = tl.load(cu_ptr + s * cu_stride, s < segments, 0)
    end = tl.load(cu_ptr + (s + 1) * cu_stride, s < segments, 0)
    begin = tl.minimum(tl.maximum(begin, 0), tokens)
    length = tl.minimum(tl.maximum(end, begin), tokens) - begin
    blocks = tl.minimum(tl.cdiv(length, ROWS), levels)
    mine = (blocks > level).to(tl.int32)
    heavier = tl.sum(tl.maximum(blocks - level - 1, 0))
    tile = tiles_ptr + 3 * (heavier + tl.cumsum(mine) - 1)
    block = blocks - 1 - level if FROM_END else tl.zeros_like(blocks) + level
    tl.store(tile, begin, mine != 0)
    tl.store(tile + 1, length, mine != 0)
    tl.store(tile + 2, block, mine != 0)
    if level == 0:  # the last one
        past = tiles_ptr + 3 * (heavier + tl.sum(mine))
        tl.store(past + tl.arange(0, LEFT_OVER), tl.zeros([LEFT_OVER], tl.int32))


def list_tiles(
    cu_seqlens: torch.Tensor, tokens: int, max_len: int, rows: int, *, from_end: bool
) -> tuple[torch.Tensor, int]:
    """(begin, length, block) of every block of `rows` rows of every segment, longest work first; and the upper bound.

    The list is larger than needed and ends with tiles of length 0.
    """
    segments = cu_seqlens.shape[0] - 1
    levels = triton.cdiv(min(max_len, tokens), rows)
    capacity = min(tokens // rows + segments, levels * segments)
    left_over = next_power_of_2(3 * capacity)
    tiles = torch.empty(3 * capacity + left_over, dtype=torch.int32, device=cu_seqlens.device)
    wide = next_power_of_2(segments)
    _list[(levels,)](
        cu_seqlens, tiles, segments, tokens, levels, cu_seqlens.stride(0),
        ROWS=rows, FROM_END=from_end, SEGMENTS=wide, LEFT_OVER=left_over, num_warps=4 if wide <= 4096 else 16,
    )  # fmt: skip
    return tiles, capacity
