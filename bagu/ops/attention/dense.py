"""Attention with all scores in memory: the formulas in the open, in fp32 (fp64 for fp64 inputs), on any device.

    S = scale * Q K^T + A        P = softmax(S)        O = P V        lse = log sum exp S

    dV = P^T dO                  dP = dO V^T           dS = P * (dP - rowsum(P * dP))
    dQ = scale * dS K            dK = scale * dS^T Q

Tensors are [B, L, heads, features]; A is `Shape.additive`. It costs B * H * L^2 numbers at a time. P is made again from
S alone, so that its rows sum to 1 as exactly as they can: a fused kernel takes it from lse, and rowsum(P * dP) as
rowsum(dO * O), which are the same but for the rounding of lse and O.
"""

from __future__ import annotations

import torch

from bagu.ops.signature import accumulator

__all__ = ["backward", "forward"]


def _heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, L, G, F] as [B, heads, L, F] in the accumulator's dtype, a group's heads beside each other."""
    B, L, G, F = x.shape
    x = x.to(accumulator(x.dtype)).transpose(1, 2)
    return x if heads == G else x.unsqueeze(2).expand(B, G, heads // G, L, F).reshape(B, heads, L, F)


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, added: torch.Tensor | None) -> torch.Tensor:
    s = (q * scale) @ k.mT
    return s if added is None else s + added


def forward(
    added: torch.Tensor | None, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[B, L, H, E] and lse[B, L, H], through which no gradient flows; differentiable as it stands."""
    H = q.shape[2]
    s = _scores(_heads_first(q, H), _heads_first(k, H), scale, added)
    out = s.softmax(-1) @ _heads_first(v, H)
    return out.transpose(1, 2).to(q.dtype), s.detach().logsumexp(-1).transpose(1, 2)


def backward(
    added: torch.Tensor | None, scale: float, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv and dS[B, H, L, L], which a learned bias needs."""
    H, G = q.shape[2], k.shape[2]
    qh, kh, vh, doh = (_heads_first(x, H) for x in (q, k, v, dout))
    p = _scores(qh, kh, scale, added).softmax(-1)
    dv = p.mT @ doh
    dp = doh @ vh.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True))
    dq, dk = scale * (ds @ kh), scale * (ds.mT @ qh)
    grouped = [x.unflatten(1, (G, H // G)).sum(2).transpose(1, 2) for x in (dk, dv)]
    return dq.transpose(1, 2).to(q.dtype), grouped[0].to(k.dtype), grouped[1].to(v.dtype), ds
