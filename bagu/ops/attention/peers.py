"""Attention by others, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def eager(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, slopes: torch.Tensor | None,
    bias: torch.Tensor | None, max_len: int, causal: bool, window: int | None, scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """SDPA over the whole batch with a mask: what a trainer does that packs and has no varlen kernel.

    Segments of one length need no mask and are a batch. The bench cases have no slopes and no bias.
    """
    assert slopes is None and bias is None
    T = q.shape[0]
    if (cu_seqlens.shape[0] - 1) * max_len == T and window is None:
        q, k, v = (x.unflatten(0, (-1, max_len)).transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)
    place = torch.arange(T, device=q.device)
    segment = torch.bucketize(place, cu_seqlens[1:], right=True)
    apart = place[:, None] - place[None, :]
    seen = segment[:, None] == segment[None, :]
    if causal:
        seen &= apart >= 0
    if window is not None:
        seen &= apart.abs() < window
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)
