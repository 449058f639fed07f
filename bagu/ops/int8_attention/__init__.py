"""Attention with int8 queries and keys, for inference. spec.py has its definition and cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.int8_attention.spec import SPEC


def int8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
    *,
    causal: bool = True,
    scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return out[T, H, D] of q[T, H, D] over k[T, G, D] and v[T, G, D], separately for each segment.

    As `attention`, but q and k are rounded to int8 first, with a scale for each query and for each 128 keys, and
    without the mean of each segment's keys. The result differs from `attention`'s by about 1 % (docs/ops.md), and there
    are no gradients. `cu_seqlens`, `max_len` and `scale` are those of `attention`. The Triton kernels have heads of 64
    and 128 features; a call with other heads runs on PyTorch, with all scores in memory on a GPU. It is faster than
    `attention` for heads of 128 in segments of 8k tokens and more (docs/ops.md).
    """
    return call(SPEC, backend, q=q, k=k, v=v, cu_seqlens=cu_seqlens, max_len=max_len, causal=causal, scale=scale)
