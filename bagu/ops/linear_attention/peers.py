"""Other implementations of linear attention, for the benchmark."""

from __future__ import annotations

import torch

from bagu.ops.linear_attention.spec import Args


def eager(a: Args) -> torch.Tensor:
    """The direct formula: all weights of the whole batch in the inputs' dtype, with a mask."""
    q, k, v = a.q, a.k, a.v
    T, per_group = q.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(per_group, 1) for x in (k, v))
    nq, nk = q if a.norm_q is None else a.norm_q, k if a.norm_k is None else a.norm_k.repeat_interleave(per_group, 1)
    place = torch.arange(T, device=q.device)
    segment = torch.bucketize(place, a.cu_seqlens[1:], right=True)
    seen = segment[:, None] == segment[None, :]
    if a.causal:
        seen &= place[:, None] >= place[None, :]
    weights = torch.einsum("ihd,jhd->hij", q, k).masked_fill(~seen, 0.0)
    norms = weights if a.norm_q is None else torch.einsum("ihd,jhd->hij", nq, nk).masked_fill(~seen, 0.0)
    return torch.einsum("hij,jhe->ihe", weights, v) / (norms.sum(-1).T.unsqueeze(-1) + a.eps)
