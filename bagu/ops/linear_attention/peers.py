"""Other implementations of linear attention, for the benchmark."""

from __future__ import annotations

import torch


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, norm_q: torch.Tensor | None,
    norm_k: torch.Tensor | None, max_len: int, causal: bool, eps: float,
) -> torch.Tensor:  # fmt: skip
    """The direct formula: all weights of the whole batch in the inputs' dtype, with a mask."""
    T, per_group = q.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(per_group, 1) for x in (k, v))
    nq, nk = q if norm_q is None else norm_q, k if norm_k is None else norm_k.repeat_interleave(per_group, 1)
    place = torch.arange(T, device=q.device)
    segment = torch.bucketize(place, cu_seqlens[1:], right=True)
    seen = segment[:, None] == segment[None, :]
    if causal:
        seen &= place[:, None] >= place[None, :]
    weights = torch.einsum("ihd,jhd->hij", q, k).masked_fill(~seen, 0.0)
    norms = weights if norm_q is None else torch.einsum("ihd,jhd->hij", nq, nk).masked_fill(~seen, 0.0)
    return torch.einsum("hij,jhe->ihe", weights, v) / (norms.sum(-1).T.unsqueeze(-1) + eps)
