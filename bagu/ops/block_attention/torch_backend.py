"""Block-sparse attention in plain PyTorch: a mask over all keys, for pieces of queries. It saves no time against dense
attention; the Triton kernels and the engine's decode do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bagu.ops.attention.shape import index, segment_of
from bagu.ops.block_attention.spec import SPEC, Args
from bagu.ops.call import eager
from bagu.ops.choose_blocks.means import packed_blocks
from bagu.ops.contract.signature import accumulator
from bagu.ops.paged_attention.spec import Args as PagedArgs
from bagu.ops.paged_attention.torch_backend import invariant_forward as paged_attention

PIECE = 256
TENSORS = len(SPEC.sig.tensors)  # the first fields of Args


def _scores(a: Args, own: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The masked scores [H, i, T] of the queries `own`, and keys and values for each head."""
    T, H, G = a.q.shape[0], a.q.shape[1], a.k.shape[1]
    dtype = accumulator(a.q.dtype)
    t, segment = index(T, a.cu_seqlens), segment_of(a.cu_seqlens, T)
    place = t - a.cu_seqlens.long().gather(0, segment)
    k, v = (_for_heads(x.to(dtype), H // G) for x in (a.k, a.v))
    chosen = (a.blocks[own].unsqueeze(2) == (place // a.size).view(1, 1, -1, 1)).any(-1)  # [i, G, T]
    seen = chosen & ((segment[own].unsqueeze(1) == segment) & (t[own].unsqueeze(1) >= t)).unsqueeze(1)
    scale = a.q.shape[-1] ** -0.5 if a.scale is None else a.scale
    scores = torch.einsum("ihd,jhd->hij", a.q[own].to(dtype), k) * scale
    return scores.masked_fill(~_for_heads(seen, H // G).transpose(0, 1), -torch.inf), k, v


def _for_heads(x: torch.Tensor, per_group: int) -> torch.Tensor:
    """x[·, G, ·] with every key head repeated for its query heads."""
    return x.unsqueeze(2).expand(-1, -1, per_group, -1).flatten(1, 2)


def _forward(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a, outs, lses = Args(*values), [], []
    for begin in range(0, max(a.q.shape[0], 1), PIECE):
        scores, _, v = _scores(a, slice(begin, begin + PIECE))
        lse = scores.logsumexp(-1)
        outs.append(torch.einsum("hij,jhe->ihe", (scores - lse.unsqueeze(-1)).exp(), v))
        lses.append(lse.T)
    return torch.cat(outs).to(a.q.dtype), torch.cat(lses)


class _Attend(torch.autograd.Function):
    """One node of the graph, so that autocast around the backward does not change its products."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], *values: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(*values)
        ctx.save_for_backward(*values[:TENSORS], out, lse)
        ctx.rest = values[TENSORS:]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        return None, *backward(Args(*tensors, *ctx.rest), douts[0], out, lse), *(None,) * (len(Args._fields) - 3)


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return _Attend.apply(_forward, *a) if eager.plain(a.q) else _forward(*a)


@torch.no_grad()
def _invariant(*values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    a = Args(*values)
    (T, H, _), G, t = a.q.shape, a.k.shape[1], torch.arange(len(a.q))
    if T == 0:
        return _forward(*a)
    rows, tables = packed_blocks(T, a.cu_seqlens, a.max_len, a.size)
    k, v, segment = a.k[rows], a.v[rows], segment_of(a.cu_seqlens, T)
    place = t - a.cu_seqlens.long()[segment]
    lengths = (((a.blocks >= 0).sum(-1) - 1) * a.size + (place % a.size + 1).unsqueeze(1)).to(torch.int32)
    pages, found = tables[segment.view(-1, 1, 1), a.blocks.clamp(min=0).long()], []
    for g in range(G):
        head, own = slice(g, g + 1), slice(g * (H // G), (g + 1) * (H // G))
        found.append(paged_attention(PagedArgs(
            a.q[:, own], k[:, :, head], v[:, :, head], pages[:, g], torch.arange(T + 1, dtype=torch.int32),
            lengths[:, g].contiguous(), None, None, None, None, None, 1, a.blocks.shape[-1] * a.size, None, a.scale,
        )))  # fmt: skip
    out, lse = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return out, lse


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """As the engine does it: to `paged_attention` each query and key head is a sequence of the blocks it chose."""
    return _Attend.apply(_invariant, *a)


@eager.without_autocast
def backward(
    a: Args, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (T, H, D), G, dtype = a.q.shape, a.k.shape[1], accumulator(a.q.dtype)
    scale = D**-0.5 if a.scale is None else a.scale
    dk, dv = (a.k.new_zeros(x.shape, dtype=dtype) for x in (a.k, a.v))
    dqs = []
    for begin in range(0, max(T, 1), PIECE):
        own = slice(begin, begin + PIECE)
        scores, k, v = _scores(a, own)
        if torch.is_grad_enabled():  # a second derivative, in which the saved lse would be a constant
            lse_own = scores.logsumexp(-1)
        else:
            lse_own = lse[own].T
        p, do = (scores - lse_own.unsqueeze(-1)).exp(), dout[own].to(dtype)
        dp = torch.einsum("ihe,jhe->hij", do, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dqs.append(torch.einsum("hij,jhd->ihd", ds, k))
        dk += torch.einsum("hij,ihd->jhd", ds, a.q[own].to(dtype)).unflatten(1, (G, H // G)).sum(2)
        dv += torch.einsum("hij,ihe->jhe", p, do).unflatten(1, (G, H // G)).sum(2)
    return torch.cat(dqs).to(a.q.dtype), dk.to(a.k.dtype), dv.to(a.v.dtype)
