"""Paged attention with Triton kernels: decodes, chunks and whole prompts, over blocks of any size.

A decode has tiles of 16 rows (in most models a key head serves at most that many query heads), a prompt of 128. Keys
are split into ranges if there are too few programs for the GPU, or if the last wave of programs would be almost empty.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from bagu.ops.attention.block_sizes import width
from bagu.ops.attention.shape import side_by_side
from bagu.ops.contract.signature import accumulator
from bagu.ops.kernels.launch import fp32_pair, next_power_of_2, num_sms, starts_early, triton_acc
from bagu.ops.paged_attention.join import join
from bagu.ops.paged_attention.paged_kernels import paged_kernel
from bagu.ops.paged_attention.pages import check_invariant
from bagu.ops.paged_attention.spec import Args

LOG2E = 1.4426950408889634
SHORTEST = 256  # keys of a range
BUSY = 0.9  # share of the time of full waves from which no further split pays


@dataclass(frozen=True, kw_only=True)
class Tile:
    """How a kernel divides the scores: rows, which are tokens times heads, by N keys."""

    rows: int
    N: int
    warps: int
    stages: int
    per_sm: int = 1  # programs that a multiprocessor runs at once
    registers: int | None = None  # the limit per thread, where `per_sm` programs need one


TILES = (
    Tile(rows=16, N=64, warps=4, stages=3, per_sm=3),
    Tile(rows=64, N=64, warps=4, stages=3),
    Tile(rows=128, N=64, warps=8, stages=3),
)
BYTES = (  # of an 8-bit cache
    Tile(rows=16, N=128, warps=4, stages=3, per_sm=3, registers=168),
    Tile(rows=64, N=64, warps=8, stages=1),
    Tile(rows=128, N=64, warps=8, stages=1),
)
WIDE = (Tile(rows=16, N=64, warps=4, stages=2), Tile(rows=64, N=64, warps=8, stages=2))  # of 256 features
EXACT = (Tile(rows=16, N=32, warps=4, stages=1), Tile(rows=32, N=32, warps=4, stages=1))  # fp32 and fp64


def _tile(rows: int, widest: int, itemsize: int, cache_itemsize: int) -> Tile:
    """The smallest tile with this many rows, or the largest."""
    tiles = EXACT if itemsize > 2 else WIDE if widest > 128 else BYTES if cache_itemsize == 1 else TILES
    return next((t for t in tiles if t.rows >= rows), tiles[-1])


def _ranges(programs: int, longest: int, per_sm: int, sms: int) -> int:
    """The number of ranges of keys: enough for a program per multiprocessor and, for decodes, for waves that are full.

    Programs of equal length run in waves of `per_sm * sms`. A smaller last wave takes the time of two programs per
    multiprocessor at least, since fewer do not saturate the memory. On an H200, 64 sequences of 8,192 tokens and 8 key
    heads (512 programs in waves of 396) are read at 0.80 of copy bandwidth unsplit.
    """
    most = max(1, longest // SHORTEST)
    if per_sm == 1:
        return min(most, triton.cdiv(sms, programs))
    wave, busy = per_sm * sms, []
    for ranges in range(1, most + 1):
        full, rest = divmod(programs * ranges, wave)
        busy.append(programs * ranges / (full * wave + (max(rest, 2 * sms) if rest else 0)))
        if busy[-1] >= BUSY:
            return ranges
    return 1 + busy.index(max(busy))


def _starts_next(programs: int, splits: int, device: torch.device) -> bool:
    """Whether the next kernel may start while this one runs. A join has few programs. A product has many, so it starts
    early only if there are few of this kernel's (kernels/early.py)."""
    return starts_early(device) and (splits > 1 or 2 * programs <= num_sms(device))


def _words(v: torch.Tensor) -> bool:
    """Whether values of an 8-bit cache can be read as words of four features (byte_planes.py)."""
    aligned = all(n % 4 == 0 for n in (v.shape[3], *v.stride()[:3], v.storage_offset()))
    return v.itemsize == 1 and aligned and width(v.shape[3]) >= 64


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    heads = next_power_of_2(a.q.shape[1] // a.k_cache.shape[2])
    return attend(a, _tile_for(a, a.max_len * heads), None)


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    check_invariant(a.k_scale)
    return attend_invariant(a)


def attend_invariant(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend` with one tile for decodes, chunks and whole prompts, and all keys in one range.

    A smaller tile for decodes would save no time (they are bound by memory), but its products would be mma.sync
    instructions instead of wgmma, and its sums over keys would have another order.
    """
    return attend(a, _tile_for(a, 64), 1)


def _tile_for(a: Args, rows: int) -> Tile:
    q, v = a.q, a.v_cache
    return _tile(rows, max(q.shape[-1], v.shape[-1]), q.element_size(), v.element_size())


def attend(a: Args, tile: Tile, ranges: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of q over the pools k[N, B, G, D] and v[N, B, G, E], with this tile and the keys in `ranges` ranges.

    None is the number of ranges that is fastest. Without block tables and context_lens nothing is past, B is 1, and
    keys are packed like queries.
    """
    (T, H, D), (_, B, G, E), S = a.q.shape, a.v_cache.shape, len(a.cu_seqlens) - 1
    acc = accumulator(a.q.dtype)
    out, lse = a.q.new_empty(T, H, E), a.q.new_empty(T, H, dtype=acc)
    if T == 0:
        return out, lse
    q, k, v = (side_by_side(x) for x in (a.q, a.k_cache, a.v_cache))
    slopes, sinks = (None if x is None else x.contiguous() for x in (a.slopes, a.sinks))
    tables = None if a.block_tables is None else side_by_side(a.block_tables)
    cu, lengths = a.cu_seqlens.contiguous(), None if a.context_lens is None else a.context_lens.contiguous()
    heads = next_power_of_2(H // G)
    tokens = max(1, tile.rows // heads)
    # Two warpgroups divide the scores as the loop's body suggests to Triton, and ONE changes it: the order of a sum.
    one = a.max_len == 1 and (ranges is None or tile.warps == 4)
    tiles = S if one else T // tokens + S
    if ranges is None:
        ranges = _ranges(tiles * G, a.max_context, tile.per_sm, num_sms(q.device))
    reach = 0 if a.window is None else min(a.window, a.max_context)  # more masks nothing; sums must fit 32 bits
    range_tiles = triton.cdiv(triton.cdiv(a.max_context, ranges), tile.N)
    splits = triton.cdiv(a.max_context, range_tiles * tile.N)
    parts, part_lse = (
        (out, lse) if splits == 1 else (q.new_empty(splits, T, H, E, dtype=acc), q.new_empty(splits, T, H, dtype=acc))
    )
    k_steps = (0, 0, 0) if a.k_scale is None else a.k_scale.stride()
    v_steps = (0, 0, 0) if a.v_scale is None else a.v_scale.stride()
    words, fp8 = tile.rows == 16 and _words(v), v.dtype == torch.float8_e4m3fn  # wgmma reads values from shared memory
    far = max(B * row + G * head for _, row, head, _ in (k.stride(), v.stride())) >= 2**31
    v = v.view(torch.int32) if words else v
    early = one and starts_early(q.device, rows=T)
    paged_kernel[(tiles * G, splits)](
        q, k, v, tables, cu, lengths, slopes, sinks, a.k_scale, a.v_scale, parts, part_lse, S, G, T, H, H // G, reach,
        *fp32_pair((D**-0.5 if a.scale is None else a.scale) * LOG2E), 0 if tables is None else tables.stride(0),
        q.stride(0), q.stride(1), *k.stride()[:3], *v.stride()[:3], *k_steps, *v_steps, range_tiles,
        0 if tables is None else tables.shape[1],
        B=B, D=D, E=E, TOKENS=tokens, HEADS=heads, N=tile.N, DW=width(D), EW=width(E), SPLITS=splits > 1,
        STAGES=tile.stages, ONE=one, WINDOW=a.window is not None, FAR=far, WORDS=4 if words else 1, FP8=fp8,
        ACC=triton_acc(q.dtype), EARLY=early, NEXT=_starts_next(tiles * G, splits, q.device), num_warps=tile.warps,
        maxnreg=tile.registers, launch_pdl=early,
    )  # fmt: skip
    if splits > 1:
        join(parts, part_lse, out, lse)
    return out, lse
