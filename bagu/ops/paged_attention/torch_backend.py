"""Paged attention with PyTorch's kernels, selected by device.

CPU, eager                        cpu.py: all decodes together, in place in the pool (compiled.py), prefills one by one
CUDA, 16 bits, no slopes, bias    cuda.py: the blocks in use are gathered, then FlashAttention-2
all others (also compiled)        dense.py: gathered, with all scores in memory

The blocks in use of an 8-bit cache are dequantized first.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from bagu.ops.attention import tiles
from bagu.ops.attention.cuda import fits
from bagu.ops.attention.shape import Shape, add_sinks
from bagu.ops.call import eager
from bagu.ops.contract.signature import accumulator
from bagu.ops.invariant import invariant_rows
from bagu.ops.paged_attention import cpu, cuda, dense
from bagu.ops.paged_attention.pages import Pages, check_invariant, dequantized, used_blocks


@torch.no_grad()
def forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor, slopes: torch.Tensor | None, bias: torch.Tensor | None, sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, max_len: int, max_context: int, window: int | None,
    scale: float | None, *, op: str = "paged_attention",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    shape = Shape(causal=True, window=window, slopes=slopes, bias=bias)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = q.dtype
    if k_scale is not None and v_scale is not None:
        q = q.to(accumulator(dtype))  # 16 bits would round keys and values once more
        blocks, block_tables = used_blocks(block_tables, max_context, k_cache)
        k_cache, v_cache = dequantized(k_cache, k_scale, blocks), dequantized(v_cache, v_scale, blocks)
    pages = Pages(k_cache, v_cache, block_tables, context_lens, max_context, op)
    if q.shape[0] == 0:
        out, lse = dense.empty(q, v_cache)
    else:
        on_cuda = q.is_cuda and fits(q, v_cache, shape)
        attend = cpu.forward if eager.plain(q) else cuda.forward if on_cuda else dense.forward
        out, lse = add_sinks(attend(shape, scale, q, pages, cu_seqlens, max_len), sinks)
    return out.to(dtype), lse


@torch.no_grad()
def invariant_forward(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor, slopes: torch.Tensor | None, bias: torch.Tensor | None, sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, max_len: int, max_context: int, window: int | None,
    scale: float | None, *, op: str = "paged_attention",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same bits that `attention` gives these tokens in batch-invariant mode."""
    check_invariant(k_scale)
    shape = Shape(causal=True, window=window, slopes=slopes, bias=bias, sinks=sinks)
    scale, B = q.shape[-1] ** -0.5 if scale is None else scale, k_cache.shape[1]
    offsets, lengths = cu_seqlens.tolist(), context_lens.tolist()
    cpu.check(op, offsets, lengths, q.shape[0], max_len, max_context)

    keys, values = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    if invariant_rows.available(q.dtype) and replace(shape, window=None).plain:
        return invariant_rows.attend(window, scale, q, keys, values, offsets, lengths, block_tables, B)

    def rows_of(sequence: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return block_tables[sequence.unsqueeze(1), place // B].long() * B + place % B

    return tiles.attend(shape, scale, q, keys, values, rows_of, offsets, lengths)
