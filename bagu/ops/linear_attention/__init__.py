"""Linear attention over packed segments. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.linear_attention.spec import SPEC

__all__ = ["linear_attention", "positive_features"]


def positive_features(x: torch.Tensor) -> torch.Tensor:
    """elu(x) + 1: the feature map for the queries and keys of `linear_attention`."""
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())  # clamped, because an infinite exp would give a NaN gradient


def linear_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_len: int,
    *,
    causal: bool = True,
    norm_q: torch.Tensor | None = None,
    norm_k: torch.Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """out[T, H, E]: attention with weights q . k instead of exp(q . k), per segment, in time linear in T.

    q[T, H, D] and k[T, G, D] are features (`positive_features`), not raw projections. The sum of the weights is
    computed from `norm_q` and `norm_k`, by default q and k. With RoPE they differ: the rotated features weight the
    values, and the features before the rotation, which are positive, give the divisor (RoFormer, section 3.3).

    >>> fq, fk = positive_features(q), positive_features(k)
    >>> out = linear_attention(rope(fq, cos, sin), rope(fk, cos, sin), v, cu_seqlens, max_len, norm_q=fq, norm_k=fk)
    """
    return call(
        SPEC, backend, q=q, k=k, v=v, cu_seqlens=cu_seqlens, norm_q=norm_q, norm_k=norm_k, max_len=max_len,
        causal=causal, eps=eps,
    )  # fmt: skip
