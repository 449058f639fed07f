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
from bagu.ops.paged_attention.spec import Args


@torch.no_grad()
def forward(a: Args, *, op: str = "paged_attention") -> tuple[torch.Tensor, torch.Tensor]:
    q, k_cache, v_cache, block_tables, scale = a.q, a.k_cache, a.v_cache, a.block_tables, a.scale
    shape = Shape(causal=True, window=a.window, slopes=a.slopes, bias=a.bias)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype = q.dtype
    if a.k_scale is not None and a.v_scale is not None:
        q = q.to(accumulator(dtype))  # 16 bits would round keys and values once more
        blocks, block_tables = used_blocks(block_tables, a.max_context, k_cache)
        k_cache, v_cache = dequantized(k_cache, a.k_scale, blocks), dequantized(v_cache, a.v_scale, blocks)
    pages = Pages(k_cache, v_cache, block_tables, a.context_lens, a.max_context, op)
    if q.shape[0] == 0:
        out, lse = dense.empty(q, v_cache)
    else:
        on_cuda = q.is_cuda and fits(q, v_cache, shape)
        attend = cpu.forward if eager.plain(q) else cuda.forward if on_cuda else dense.forward
        out, lse = add_sinks(attend(shape, scale, q, pages, a.cu_seqlens, a.max_len), a.sinks)
    return out.to(dtype), lse


@torch.no_grad()
def invariant_forward(a: Args, *, op: str = "paged_attention") -> tuple[torch.Tensor, torch.Tensor]:
    """The same bits that `attention` gives these tokens in batch-invariant mode."""
    q, scale = a.q, a.scale
    check_invariant(a.k_scale)
    shape = Shape(causal=True, window=a.window, slopes=a.slopes, bias=a.bias, sinks=a.sinks)
    scale, B = q.shape[-1] ** -0.5 if scale is None else scale, a.k_cache.shape[1]
    offsets, lengths = a.cu_seqlens.tolist(), a.context_lens.tolist()
    cpu.check(op, offsets, lengths, q.shape[0], a.max_len, a.max_context)

    keys, values = a.k_cache.flatten(0, 1), a.v_cache.flatten(0, 1)
    if invariant_rows.available(q.dtype) and replace(shape, window=None).plain:
        return invariant_rows.attend(a.window, scale, q, keys, values, offsets, lengths, a.block_tables, B)

    def rows_of(sequence: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return a.block_tables[sequence.unsqueeze(1), place // B].long() * B + place % B

    return tiles.attend(shape, scale, q, keys, values, rows_of, offsets, lengths)
