"""Attention with Triton kernels over packed segments of any lengths.

    work_list.py         the list of blocks, longest work first, built on the device
    forward_kernel.py    out and lse
    backward_kernels.py  dq, then dk and dv; no atomics, so deterministic
    score_kernels.py     code shared by these kernels
    block_sizes.py       the block sizes

It has no learned bias (`choice.py` lists the unsupported calls). 16-bit keys and values are read by TMA; rows that are
not 16-byte aligned are copied first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from bagu.ops.attention.backward_kernels import dkdv_kernel, dq_kernel
from bagu.ops.attention.block_sizes import Block, Blocks, blocks_for, reads_by_tma, width
from bagu.ops.attention.forward_kernel import forward_kernel
from bagu.ops.attention.shape import side_by_side
from bagu.ops.attention.spec import Args
from bagu.ops.attention.work_list import list_tiles
from bagu.ops.contract.signature import accumulator
from bagu.ops.kernels.launch import fp32_pair, triton_acc
from bagu.ops.paged_attention.spec import Args as Paged
from bagu.ops.paged_attention.triton_backend import attend_invariant
from bagu.ops.replay.launcher import with_scratch_memory

LOG2E = 1.4426950408889634


def _launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch with scratch memory, which the kernels need for TMA descriptors."""
    with_scratch_memory(kernel[grid])(*args, **options)


def readable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy, with unit stride along the features and, for TMA, every row 16-byte aligned."""
    x, each = side_by_side(x), 16 // x.element_size()
    if not reads_by_tma(x):
        return x
    if not any([x.data_ptr() % 16, 0 in x.stride(), *(s % each for s in x.stride()[:-1])]):
        return x
    wide = triton.cdiv(x.shape[-1], each) * each
    return x.new_empty(*x.shape[:-1], wide)[..., : x.shape[-1]].copy_(x)


def _scores(scale: float, softcap: float | None) -> tuple[float, ...]:
    """scale and cap as score_kernels.py defines them, each as a pair of fp32."""
    if softcap is None:
        return *fp32_pair(scale * LOG2E), 1.0, 0.0
    return *fp32_pair(scale / softcap), *fp32_pair(softcap * LOG2E)


def _reach(window: int | None, max_len: int) -> int:
    """The window for the kernels, capped by max_len: a larger one masks nothing, and sums with it must fit 32 bits."""
    return 0 if window is None else min(window, max_len)


def _blocks(q: torch.Tensor, v: torch.Tensor, window: int | None, softcap: float | None) -> Blocks:
    terms = window is not None or softcap is not None
    return blocks_for(q.shape[-1], v.shape[-1], tma=reads_by_tma(q), terms=terms)


def _tiles(
    cu_seqlens: torch.Tensor | None, T: int, max_len: int, rows: int, *, from_end: bool
) -> tuple[torch.Tensor | None, int]:
    """The list of tiles, and how many programs compute them; None if all segments have max_len tokens."""
    if cu_seqlens is None:
        return None, T // max_len * triton.cdiv(max_len, rows)
    return list_tiles(cu_seqlens, T, max_len, rows, from_end=from_end)


def _constants(
    q: torch.Tensor,
    v: torch.Tensor,
    slopes: torch.Tensor | None,
    causal: bool,
    window: int | None,
    softcap: float | None,
    block: Block,
) -> dict[str, Any]:
    """The constexpr arguments and launch options of a kernel."""
    D, E = q.shape[-1], v.shape[-1]
    return {
        "D": D, "E": E, "M": block.M, "N": block.N, "DW": width(D), "EW": width(E), "STAGES": block.stages,
        "TMA": reads_by_tma(q), "CAUSAL": causal, "WINDOW": window is not None, "CAP": softcap is not None,
        "RAW": softcap is None and slopes is None,
        "ACC": triton_acc(q.dtype), "num_warps": block.warps, "maxnreg": block.registers,
    }  # fmt: skip


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """Without `cu_seqlens` every segment has max_len tokens, and no list of tiles is made."""
    q, k, v, slopes, sinks, scale = a.q, a.k, a.v, a.slopes, a.sinks, a.scale
    (T, H, D), (G, E) = q.shape, v.shape[1:]
    out, lse = q.new_empty(T, H, E), q.new_empty(T, H, dtype=accumulator(q.dtype))
    if T == 0:
        return out, lse
    scale = D**-0.5 if scale is None else scale
    slopes, sinks = (None if x is None else x.contiguous() for x in (slopes, sinks))
    block = _blocks(q, v, a.window, a.softcap).forward
    q, k, v = (readable(x) for x in (q, k, v))
    tiles, count = _tiles(a.cu_seqlens, T, a.max_len, block.M, from_end=False)
    _launch(
        forward_kernel, (count, H), q, k, v, slopes, sinks, out, lse, tiles, a.max_len, H, H // G,
        _reach(a.window, a.max_len), *_scores(scale, a.softcap), *(x.stride(d) for d in (0, 1) for x in (q, k, v)),
        **_constants(q, v, slopes, a.causal, a.window, a.softcap, block),
    )  # fmt: skip
    return out, lse


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits that `paged_attention` gives these tokens in invariant mode, by its kernel.

    It has no softcap and no bidirectional attention. Such a model does not decode from a cache, and `forward` computes
    a segment by its own length alone.
    """
    if not a.causal or a.softcap is not None:
        return forward(a)
    none: Any = None  # packed keys have no block tables
    return attend_invariant(
        Paged(
            a.q, a.k.unsqueeze(1), a.v.unsqueeze(1), none, a.cu_seqlens, none, a.slopes, None, a.sinks, None, None,
            a.max_len, a.max_len, a.window, a.scale,
        )
    )  # fmt: skip


def backward(
    a: Args, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, *, into: Sequence[torch.Tensor] | None = None
) -> tuple[torch.Tensor | None, ...]:
    """`into` are dq, dk and dv to write, with any stride between tokens."""
    q, k, v, slopes, scale = a.q, a.k, a.v, a.slopes, a.scale
    (T, H, D), (G, E) = q.shape, v.shape[1:]
    scale = D**-0.5 if scale is None else scale
    slopes = None if slopes is None else slopes.contiguous()
    q, k, v, dout, out = *(readable(x) for x in (q, k, v, dout)), side_by_side(out)
    stats = q.new_empty(H, T, 2, dtype=lse.dtype)  # log2 and delta (backward_kernels.py)
    dq, dk, dv = (q.new_empty(T, H, D), k.new_empty(T, G, D), v.new_empty(T, G, E)) if into is None else into
    if T > 0:
        blocks, read = _blocks(q, v, a.window, a.softcap), (q, k, v, slopes, dout)
        scalars = H // G, _reach(a.window, a.max_len), *_scores(scale, a.softcap)
        sized = lambda block: _constants(q, v, slopes, a.causal, a.window, a.softcap, block)  # noqa: E731
        tiles, count = _tiles(a.cu_seqlens, T, a.max_len, blocks.dq.M, from_end=False)
        _launch(
            dq_kernel, (count, H), *read, out, lse.contiguous(), dq, stats, tiles, a.max_len, T, H, *scalars,
            *(x.stride(d) for d in (0, 1) for x in (q, k, v, dout, out)), dq.stride(0), **sized(blocks.dq),
        )  # fmt: skip
        tiles, count = _tiles(a.cu_seqlens, T, a.max_len, blocks.dkdv.N, from_end=True)
        _launch(
            dkdv_kernel, (count, G), *read, stats, dk, dv, tiles, a.max_len, T, G, *scalars,
            *(x.stride(d) for d in (0, 1) for x in (q, k, v, dout)), dk.stride(0), dv.stride(0), GROUPED=H != G,
            **sized(blocks.dkdv),
        )  # fmt: skip
    dsinks = None
    if a.sinks is not None:
        log2, delta = stats.unbind(2)
        weights = torch.exp2(a.sinks.to(log2.dtype).unsqueeze(1) * LOG2E - log2)
        dsinks = -(weights * delta).sum(1).to(a.sinks.dtype)
    return dq, dk, dv, None, dsinks
