"""Attention of other libraries, for the benchmark. Each function returns out, or out and lse."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bagu.errors import NotOffered
from bagu.ops.attention import cuda
from bagu.ops.attention.shape import Shape


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
    causal: bool,
    window: int | None,
    scale: float | None,
    **terms: Any,
) -> torch.Tensor:
    """SDPA over the whole batch with a mask, as a trainer with packing but without a varlen kernel runs it.

    Segments of one length need no mask and run as a batch.
    """
    _refuse(terms, "SDPA")
    T = q.shape[0]
    if _equal(q, cu_seqlens, max_len) and window is None:
        return _as_batch(q, k, v, max_len, causal, scale)
    place = torch.arange(T, device=q.device)
    segment = torch.bucketize(place, cu_seqlens[1:], right=True)
    distance = place[:, None] - place[None, :]
    seen = segment[:, None] == segment[None, :]
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance.abs() < window
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def cudnn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
    causal: bool,
    window: int | None,
    scale: float | None,
    **terms: Any,
) -> torch.Tensor:
    _refuse(terms, "cuDNN through SDPA")
    if not _equal(q, cu_seqlens, max_len) or window is not None:
        raise NotOffered("cuDNN through SDPA has segments of one length and no window")
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return _as_batch(q, k, v, max_len, causal, scale)


def flash_attention_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
    causal: bool,
    window: int | None,
    scale: float | None,
    **terms: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The varlen kernel that ships with PyTorch."""
    _refuse(terms, "FlashAttention-2 in PyTorch")
    shape, scale = Shape(causal=causal, window=window), q.shape[-1] ** -0.5 if scale is None else scale
    if not cuda.fits(q, v, shape):
        raise NotOffered("FlashAttention-2 has 16-bit inputs and heads of up to 256 features")
    return cuda.packed(shape, scale, q, k, v, cu_seqlens, max_len)


def _refuse(terms: dict[str, Any], who: str) -> None:
    given = [name for name, value in terms.items() if value is not None]
    if given:
        raise NotOffered(f"{who} has no {', '.join(given)}")


def _equal(q: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int) -> bool:
    return (cu_seqlens.shape[0] - 1) * max_len == q.shape[0]


def _as_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, causal: bool, scale: float | None
) -> torch.Tensor:
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)
