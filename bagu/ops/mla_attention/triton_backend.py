"""MLA attention with Triton kernels: decodes, chunks and whole prompts, over blocks of any size.

hopper_kernel.py is written for Hopper and the sizes of DeepSeek-V2 and V3; all other calls run mla_kernels.py. Both
split the keys into ranges if that fills the GPU better, and paged attention's kernel joins their results.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from bagu.ops.attention.block_sizes import width
from bagu.ops.attention.shape import side_by_side
from bagu.ops.contract.signature import accumulator
from bagu.ops.kernels.launch import fp32_pair, is_hopper, next_power_of_2, num_sms, triton_acc
from bagu.ops.mla_attention.mla_kernels import mla_kernel
from bagu.ops.mla_attention.spec import Args
from bagu.ops.paged_attention.join import join
from bagu.ops.paged_attention.triton_backend import LOG2E, Tile

SPLITS = (8192, 4096, 2048, 1024, 512, 256)  # lengths of a range of keys
TILES = (Tile(rows=16, N=64, warps=8, stages=2), Tile(rows=64, N=64, warps=8, stages=2))
EXACT = (Tile(rows=16, N=16, warps=4, stages=1),)  # fp32 and fp64
HOPPER = Tile(rows=64, N=64, warps=8, stages=2)
# What a range costs, in keys that a program multiplies in the same time (64 x 4k, 128 heads on an H200: 23 keys per us;
# 180 us in one range, 210 in two, 229 in four)
STARTUP, JOIN = 256, 190


def _tile(rows: int, itemsize: int) -> Tile:
    """The smallest tile with this many rows, or the largest."""
    tiles = EXACT if itemsize > 2 else TILES
    return next((t for t in tiles if t.rows >= rows), tiles[-1])


def _split(programs: int, max_context: int, sms: int) -> int:
    """The length of a range of keys with the earliest end, if every sequence has max_context; 0: one range."""

    def end(n: int) -> float:
        ranges = triton.cdiv(max_context, n)
        joined = JOIN * ranges * programs / sms if ranges > 1 else 0
        return triton.cdiv(programs * ranges, sms) * (n + STARTUP) + joined

    best = min((max_context, *(n for n in SPLITS if n < max_context)), key=end)
    return 0 if best == max_context else best


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    q, cache, rank, window, scale = a.q, a.cache, a.rank, a.window, a.scale
    (T, H, D), S, acc = q.shape, a.block_tables.shape[0], accumulator(q.dtype)
    out, lse = q.new_empty(T, H, rank), q.new_empty(T, H, dtype=acc)
    if T == 0:
        return out, lse
    q, cache, tables = (side_by_side(x) for x in (q, cache, a.block_tables))
    lists = tables, a.cu_seqlens.contiguous(), a.context_lens.contiguous()
    scale = (D**-0.5 if scale is None else scale) * LOG2E
    hopper = _fits_hopper(q, cache, rank, window)
    tile = HOPPER if hopper else _tile(a.max_len * H, q.element_size())
    heads = tile.rows if hopper else min(next_power_of_2(H), tile.rows)
    groups, tokens = triton.cdiv(H, heads), tile.rows // heads
    one = a.max_len == 1
    programs = groups * (T if hopper else S if one else T // tokens + S)
    split = _split(programs, a.max_context, num_sms(q.device))
    splits = triton.cdiv(a.max_context, split) if split else 1
    parts, part_lse = (
        (out, lse)
        if splits == 1
        else (q.new_empty(splits, T, H, rank, dtype=acc), q.new_empty(splits, T, H, dtype=acc))
    )
    strides = tables.stride(0), q.stride(0), q.stride(1), cache.stride(0), cache.stride(1)
    sizes: dict[str, Any] = {
        "B": cache.shape[1],
        "E": rank,
        "R": D - rank,
        "N": tile.N,
        "SPLIT": split,
        "LARGE": strides[3] * len(cache) >= 2**31,
        "num_warps": tile.warps,
    }
    if hopper:
        from bagu.ops.mla_attention.hopper_kernel import hopper_kernel

        hopper_kernel[(programs, splits)](
            q, cache, *lists, parts, part_lse, S, T, H, groups, scale, *strides, M=tile.rows, **sizes
        )
    else:
        reach = 0 if window is None else min(window, a.max_context)  # a larger one masks nothing; sums must fit 32 bits
        mla_kernel[(programs, splits)](
            q, cache, *lists, parts, part_lse, S, T, H, groups, reach, *fp32_pair(scale), *strides, TOKENS=tokens,
            HEADS=heads, EW=width(rank), RW=width(D - rank), STAGES=tile.stages, ONE=one,
            WINDOW=window is not None, ACC=triton_acc(q.dtype), **sizes,
        )  # fmt: skip
    if splits > 1:
        join(parts, part_lse, out, lse)
    return out, lse


def _fits_hopper(q: torch.Tensor, cache: torch.Tensor, rank: int, window: int | None) -> bool:
    """Whether hopper_kernel.py can run this call, which copies 16 bytes at a time, and has the heads to fill a tile."""
    fits = window is None and (rank, q.shape[2] - rank) == (512, 64) and q.shape[1] > HOPPER.rows // 2
    strides = (*q.stride()[:2], *cache.stride()[:2])
    aligned = all(n % 16 == 0 for n in strides) and all(x.is_meta or x.data_ptr() % 16 == 0 for x in (q, cache))
    return fits and aligned and q.element_size() == 2 and (q.is_meta or (q.is_cuda and is_hopper(q.device)))
