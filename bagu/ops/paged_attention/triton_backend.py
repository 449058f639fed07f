"""Paged attention with Triton kernels: decodes, chunks and whole prompts, over blocks of any size.

A decode has tiles of 16 rows (in most models a key head serves at most that many query heads), a prompt of 128. Keys
are split into ranges if there are too few tiles for the GPU; `_split` chooses the length of a range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from bagu.ops.attention.block_sizes import width
from bagu.ops.attention.shape import side_by_side
from bagu.ops.launch import fp32_pair, next_power_of_2, num_sms, triton_acc
from bagu.ops.paged_attention.paged_kernels import join_kernel, paged_kernel
from bagu.ops.signature import accumulator

__all__ = ["forward"]

LOG2E = 1.4426950408889634
SPLITS = (4096, 2048, 1024, 512, 256)  # lengths of a range of keys
JOINED = 16  # ranges that the join reads at once


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a kernel divides the scores: rows, which are tokens times heads, by N keys."""

    rows: int
    N: int
    warps: int
    stages: int


TILES = (
    Tile(rows=16, N=128, warps=4, stages=2),
    Tile(rows=64, N=64, warps=4, stages=3),
    Tile(rows=128, N=64, warps=8, stages=3),
)
WIDE = (Tile(rows=16, N=64, warps=4, stages=2), Tile(rows=64, N=64, warps=8, stages=2))  # of 256 features
EXACT = (Tile(rows=16, N=32, warps=4, stages=1), Tile(rows=32, N=32, warps=4, stages=1))  # fp32 and fp64


def _tile(rows: int, widest: int, itemsize: int) -> Tile:
    """The smallest tile with this many rows, or the largest."""
    tiles = EXACT if itemsize > 2 else TILES if widest <= 128 else WIDE
    return next((t for t in tiles if t.rows >= rows), tiles[-1])


def _split(tiles: int, max_context: int, device: torch.device) -> int:
    """The length of a range of keys: the longest that gives each multiprocessor a program; 0: all keys are one range.

    On an H200, 4 sequences of 32,768 tokens read at 0.85 of copy bandwidth in ranges of 4,096, and at 0.72 in 2,048.
    """
    wanted = num_sms(device)
    if tiles >= wanted or max_context <= SPLITS[-1]:
        return 0
    return next((n for n in SPLITS if tiles * triton.cdiv(max_context, n) >= wanted), SPLITS[-1])


def forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor, slopes: torch.Tensor | None, bias: torch.Tensor | None, sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, max_len: int, max_context: int, window: int | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    (T, H, D), (_, B, G, E), S = q.shape, v_cache.shape, block_tables.shape[0]
    acc = accumulator(q.dtype)
    out, lse = q.new_empty(T, H, E), q.new_empty(T, H, dtype=acc)
    if T == 0:
        return out, lse
    q, k, v = (side_by_side(x) for x in (q, k_cache, v_cache))
    slopes, sinks = (None if x is None else x.contiguous() for x in (slopes, sinks))
    tables, cu, lengths = side_by_side(block_tables), cu_seqlens.contiguous(), context_lens.contiguous()
    heads = next_power_of_2(H // G)
    tile = _tile(max_len * heads, max(D, E), q.element_size())
    tokens = max(1, tile.rows // heads)
    tiles = S if max_len == 1 else T // tokens + S
    reach = 0 if window is None else min(window, max_context)  # a larger one masks nothing, and sums must fit 32 bits
    split = _split(tiles * G, max_context, q.device)
    splits = triton.cdiv(max_context, split) if split else 1
    parts, part_lse = (out, lse) if splits == 1 else (
        q.new_empty(splits, T, H, E, dtype=acc), q.new_empty(splits, T, H, dtype=acc)
    )  # fmt: skip
    k_steps, v_steps = ((0, 0, 0) if x is None else x.stride() for x in (k_scale, v_scale))
    paged_kernel[(tiles, G, splits)](
        q, k, v, tables, cu, lengths, slopes, sinks, k_scale, v_scale, parts, part_lse, S, T, H, H // G, reach,
        *fp32_pair((D**-0.5 if scale is None else scale) * LOG2E), tables.stride(0), q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), k.stride(2), v.stride(0), v.stride(1), v.stride(2),
        *k_steps, *v_steps, B=B, D=D, E=E, TOKENS=tokens,
        HEADS=heads, N=tile.N, DW=width(D), EW=width(E), SPLIT=split if splits > 1 else 0, STAGES=tile.stages,
        ONE=max_len == 1, WINDOW=window is not None, ACC=triton_acc(q.dtype), num_warps=tile.warps,
    )  # fmt: skip
    if splits > 1:
        join_kernel[(T * H,)](
            parts, part_lse, out, lse, splits, T * H, E=E, EW=width(E), P=JOINED, ACC=triton_acc(q.dtype), num_warps=1
        )
    return out, lse
