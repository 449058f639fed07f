"""Block-sparse attention in plain PyTorch: a mask over all keys, for pieces of queries. It saves no time against dense
attention; the Triton kernels and the engine's decode do."""

from __future__ import annotations

import torch

from bagu.ops.attention.shape import index, segment_of
from bagu.ops.block_attention.spec import Args
from bagu.ops.contract.signature import accumulator

PIECE = 256


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


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    outs, lses = [], []
    for begin in range(0, max(a.q.shape[0], 1), PIECE):
        scores, _, v = _scores(a, slice(begin, begin + PIECE))
        lse = scores.logsumexp(-1)
        outs.append(torch.einsum("hij,jhe->ihe", (scores - lse.unsqueeze(-1)).exp(), v))
        lses.append(lse.T)
    return torch.cat(outs).to(a.q.dtype), torch.cat(lses)


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(a)


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
        p, do = (scores - lse[own].T.unsqueeze(-1)).exp(), dout[own].to(dtype)
        dp = torch.einsum("ihe,jhe->hij", do, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
        dqs.append(torch.einsum("hij,jhd->ihd", ds, k))
        dk += torch.einsum("hij,ihd->jhd", ds, a.q[own].to(dtype)).unflatten(1, (G, H // G)).sum(2)
        dv += torch.einsum("hij,ihe->jhe", p, do).unflatten(1, (G, H // G)).sum(2)
    return torch.cat(dqs).to(a.q.dtype), dk.to(a.k.dtype), dv.to(a.v.dtype)
