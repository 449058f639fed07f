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
from bagu.ops.rope.spec import Args as Rope
from bagu.ops.rope_kv_write.spec import Args


class _Ops(NamedTuple):
    """Implementations of two ops. The third, the write, has one."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, None, str], torch.Tensor]


TORCH = _Ops(
    norm=lambda x, w, eps: rms_norm_torch.forward(x, w, eps)[0],
    rotate=lambda *args: rope_torch.forward(Rope(*args))[0],
)
DISPATCHED = _Ops(norm=rms_norm, rotate=rope)


@torch.no_grad()
def _run(a: Args, ops: _Ops) -> tuple[torch.Tensor]:
    T, G, C, D = a.qkv.shape
    q, k, v = a.qkv.split((C - 2, 1, 1), 2)
    k, v = k.squeeze(2), v.squeeze(2)
    if a.k_scale is not None:
        k = k.to(accumulator(k.dtype))  # 8 bits are rounded once, not after 16 bits
    if a.q_weight is not None and a.k_weight is not None:
        q, k = ops.norm(q, a.q_weight, a.eps), ops.norm(k, a.k_weight, a.eps)
    q = q.reshape(T, G * (C - 2), D)
    if a.cos is not None and a.sin is not None:
        q, k = ops.rotate(q, a.cos, a.sin, None, a.layout), ops.rotate(k, a.cos, a.sin, None, a.layout)
    kv_write.forward(k, a.slots, a.k_cache, a.k_scale)
    kv_write.forward(v, a.slots, a.v_cache, a.v_scale)
    return (q.contiguous(),)


def forward(a: Args) -> tuple[torch.Tensor]:
    return _run(a, TORCH)


def invariant_forward(a: Args) -> tuple[torch.Tensor]:
    """The ops that a training forward calls, in invariant mode too, so that the bits are the same."""
    return _run(a, DISPATCHED)
