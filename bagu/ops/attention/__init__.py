"""Attention over packed segments. spec.py has its definition and cost."""

import torch

from bagu.ops.attention.spec import SPEC
from bagu.ops.call.dispatch import call


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
    """Return (out[T, H, E], lse[T, H]) of q[T, H, D] over k[T, G, D] and v[T, G, E], separately for each segment.

    `cu_seqlens` holds the offset of each segment, then T. T may be repeated: the extra segments are empty. `max_len` is
    an upper bound of segment lengths. Heads share keys and values in groups of H / G. With `window` = w, a query
    attends to keys at a distance below w on each side that `causal` allows. `scale` defaults to 1 / sqrt(D).
    `slopes[H]` are ALiBi's. `bias[H, 2R - 1]` is added by distance and has a gradient: it uses column R - 1 + (j - i),
    clamped to the first and last column. `sinks[H]` are logits with a gradient that are added to each head's
    denominator. `softcap` = c changes scores to c * tanh(score / c) before slopes and bias are added. `lse` includes
    the sink and has no gradient.

    On a CUDA device with no backend requested, Triton kernels run every call except segments of one length for which
    cuDNN is faster; `bagu ops show attention` lists the backend of each case.
    """
    return call(
        SPEC, backend, q=q, k=k, v=v, cu_seqlens=cu_seqlens, slopes=slopes, bias=bias, sinks=sinks, max_len=max_len,
        causal=causal, window=window, scale=scale, softcap=softcap,
    )  # fmt: skip
