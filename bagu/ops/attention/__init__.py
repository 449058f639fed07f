"""Attention over packed segments. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.attention.spec import SPEC
from bagu.ops.dispatch import call


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    slopes: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out[T, H, E], lse[T, H]) of q[T, H, D] over k[T, G, D] and v[T, G, E], each segment for itself.

    `cu_seqlens` are the offsets at which segments begin, and T (repeated as often as the caller likes: those segments
    are empty). `max_len` bounds a segment's length. Heads share keys and values in groups of H / G. With `window` = w
    a query sees the w nearest keys on each side that `causal` leaves it, itself counted. `scale` is 1 / sqrt(D) where
    it is not given. `slopes[H]` are ALiBi's; `bias[H, 2R - 1]` is added by distance and has a gradient: column
    R - 1 + (j - i), distances past R - 1 taking the last column. `sinks[H]`, logits with a gradient, join each head's
    denominator. `softcap` = c makes scores c * tanh(score / c) before slopes and bias are added. `lse` has the sink in
    it, and no gradient.

    On a CUDA device, where no backend is asked for, Triton kernels run all but segments of one length that cuDNN does
    faster; `bagu ops show attention` lists what runs where.
    """
    return call(
        SPEC, backend, q=q, k=k, v=v, cu_seqlens=cu_seqlens, slopes=slopes, bias=bias, sinks=sinks, max_len=max_len,
        causal=causal, window=window, scale=scale, softcap=softcap,
    )  # fmt: skip
