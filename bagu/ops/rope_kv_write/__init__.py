"""QK norm, RoPE and the cache write of new tokens. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.rope_kv_write.spec import SPEC


def rope_kv_write(
    qkv: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    layout: str = "half",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The queries q[T, H, D] of qkv[T, G, H / G + 2, D] for `paged_attention`; writes keys and values to the caches.

    The heads of a group are its query heads, its key and its value. With `q_weight` and `k_weight`, queries and keys
    are normalized (`rms_norm`); with cos[T, R] and sin[T, R], a row per token, they are rotated (`rope`). Then row t of
    the keys and of the values goes to slot `slots[t]` of its cache (`kv_write`, also for 8-bit caches with scales).
    """
    return call(
        SPEC, backend, qkv=qkv, slots=slots, k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale,
        cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight, eps=eps, layout=layout,
    )  # fmt: skip
