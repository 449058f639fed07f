"""QK norm, RoPE and the cache write as separate ops, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.kv_write import torch_backend as kv_write
from bagu.ops.rms_norm import rms_norm
from bagu.ops.rms_norm import torch_backend as rms_norm_torch
from bagu.ops.rope import rope
from bagu.ops.rope import torch_backend as rope_torch


class _Ops(NamedTuple):
    """Implementations of two ops. The third, the write, has one."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, None, str], torch.Tensor]


TORCH = _Ops(
    norm=lambda x, w, eps: rms_norm_torch.forward(x, w, eps)[0],
    rotate=lambda x, cos, sin, positions, layout: rope_torch.forward(x, cos, sin, positions, layout)[0],
)
DISPATCHED = _Ops(
    norm=lambda x, w, eps: rms_norm(x, w, eps),
    rotate=lambda x, cos, sin, positions, layout: rope(x, cos, sin, positions, layout),
)


@torch.no_grad()
def _run(
    ops: _Ops, qkv: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None,
    q_weight: torch.Tensor | None, k_weight: torch.Tensor | None, eps: float, layout: str,
) -> tuple[torch.Tensor]:  # fmt: skip
    T, G, C, D = qkv.shape
    q, k, v = qkv.split((C - 2, 1, 1), 2)
    k, v = k.squeeze(2), v.squeeze(2)
    if k_scale is not None:
        k = k.to(accumulator(k.dtype))  # 8 bits are rounded once, not after 16 bits
    if q_weight is not None and k_weight is not None:
        q, k = ops.norm(q, q_weight, eps), ops.norm(k, k_weight, eps)
    q = q.reshape(T, G * (C - 2), D)
    if cos is not None and sin is not None:
        q, k = ops.rotate(q, cos, sin, None, layout), ops.rotate(k, cos, sin, None, layout)
    kv_write.forward(k, slots, k_cache, k_scale)
    kv_write.forward(v, slots, v_cache, v_scale)
    return (q.contiguous(),)


def forward(
    qkv: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, eps: float, layout: str,
) -> tuple[torch.Tensor]:  # fmt: skip
    return _run(TORCH, qkv, slots, k_cache, v_cache, k_scale, v_scale, cos, sin, q_weight, k_weight, eps, layout)


def invariant_forward(
    qkv: torch.Tensor, slots: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, cos: torch.Tensor | None, sin: torch.Tensor | None, q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None, eps: float, layout: str,
) -> tuple[torch.Tensor]:  # fmt: skip
    """The ops that a training forward calls, in invariant mode too, so that the bits are the same."""
    return _run(DISPATCHED, qkv, slots, k_cache, v_cache, k_scale, v_scale, cos, sin, q_weight, k_weight, eps, layout)
