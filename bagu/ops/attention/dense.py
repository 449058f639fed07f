"""Attention with all scores in memory: the formulas in plain PyTorch, in fp32 (fp64 for fp64 inputs), on any device.

    S = cap(scale * Q K^T) + A   P = softmax(S)        O = P V        lse = log sum exp S

    dV = P^T dO                  dP = dO V^T           dS = P * (dP - rowsum(P * dP))
    dQ = scale * (dS * cap') K   dK = scale * (dS * cap')^T Q

Tensors are [B, L, heads, features]; A is `Shape.additive`, and there may be fewer queries than keys. Each tensor of
scores has B * H * L^2 numbers. With a softcap, cap(x) = c * tanh(x / c), whose slope is 1 - tanh^2. A sink is one more
column of S without a value: it gets a weight in each row of P, and its gradient is
-sum of (that weight) * rowsum(P * dP).

The backward recomputes P from S, so that its rows sum to 1 as exactly as possible. A fused kernel computes P from lse,
and rowsum(P * dP) as rowsum(dO * O); these are equal except for the rounding of lse and O.
"""

from typing import NamedTuple

import torch

from bagu.ops.contract.signature import accumulator


def _heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, L, G, F] as [B, heads, L, F] in the accumulator's dtype; the heads of a group are adjacent."""
    B, L, G, F = x.shape
    x = x.to(accumulator(x.dtype)).transpose(1, 2)
    return x if heads == G else x.unsqueeze(2).expand(B, G, heads // G, L, F).reshape(B, heads, L, F)


def _with_sink(s: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """s[B, H, I, J] with the sink of each head as an additional last column, if there are sinks."""
    if sinks is None:
        return s
    return torch.cat((s, sinks.to(s.dtype).view(-1, 1, 1).expand(*s.shape[:-1], 1)), -1)


def forward(
    added: torch.Tensor | None,
    scale: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out[B, L, H, E] and lse[B, L, H]; autograd can differentiate out, but lse has no gradient."""
    H, keys = q.shape[2], k.shape[1]
    s = (_heads_first(q, H) * scale) @ _heads_first(k, H).mT
    s = s if softcap is None else (s / softcap).tanh() * softcap
    s = _with_sink(s if added is None else s + added, sinks)
    out = s.softmax(-1)[..., :keys] @ _heads_first(v, H)
    return out.transpose(1, 2).to(q.dtype), s.detach().logsumexp(-1).transpose(1, 2)


class Gradients(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor  # dS[B, H, L, L], used for the gradient of a learned bias
    sinks: torch.Tensor | None


def backward(
    added: torch.Tensor | None,
    scale: float,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
) -> Gradients:
    H, G, keys = q.shape[2], k.shape[2], k.shape[1]
    qh, kh, vh, doh = (_heads_first(x, H) for x in (q, k, v, dout))
    s, slope = (qh * scale) @ kh.mT, None
    if softcap is not None:
        s = (s / softcap).tanh()
        s, slope = s * softcap, 1 - s * s
    p = _with_sink(s if added is None else s + added, sinks).softmax(-1)
    p, rest = p[..., :keys], p[..., keys:]
    dv = p.mT @ doh
    dp = doh @ vh.mT
    delta = (p * dp).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    dproduct = ds if slope is None else ds * slope
    dq, dk = scale * (dproduct @ kh), scale * (dproduct.mT @ qh)
    grouped = [x.unflatten(1, (G, H // G)).sum(2).transpose(1, 2) for x in (dk, dv)]
    return Gradients(
        q=dq.transpose(1, 2).to(q.dtype),
        k=grouped[0].to(k.dtype),
        v=grouped[1].to(v.dtype),
        scores=ds,
        sinks=None if sinks is None else -(rest * delta).sum((0, 2, 3)),
    )
