"""The attention block in PyTorch: the products of `matmul` around the torch backend of `attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.attention import torch_backend as attention
from bagu.ops.attention.spec import Args as Attention
from bagu.ops.matmul.torch_backend import linear, of_product
from bagu.ops.self_attention.spec import Args

EVERY = dict.fromkeys(("x", "w_in", "w_out", "b_in", "b_out"), True)
Results = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


def by_head(heads: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors [B, S, N] as [T, H, D]."""
    return [t.flatten(0, 1).unflatten(-1, (heads, -1)) for t in tensors]


def _offsets(x: torch.Tensor) -> torch.Tensor:
    """Where each of the sequences x[B, S, K] begins."""
    return x.shape[1] * torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: Any, length: int, causal: bool
) -> Attention:
    """The call of `attention` on sequences of one length; `cu_seqlens` is None for the kernels, which need none."""
    terms: dict[str, Any] = dict.fromkeys(("slopes", "bias", "sinks", "window", "scale", "softcap"))
    return Attention(q=q, k=k, v=v, cu_seqlens=cu_seqlens, max_len=length, causal=causal, **terms)


def forward(a: Args) -> Results:
    x = a.x
    qkv = linear(x, a.w_in, a.b_in)
    q, k, v = by_head(a.heads, *qkv.chunk(3, -1))
    out, lse = attention.forward(attended(q, k, v, _offsets(x), x.shape[1], a.causal))
    mixed = out.reshape(*x.shape[:2], a.w_out.shape[1])
    return linear(mixed, a.w_out, a.b_out), qkv, mixed, lse.unflatten(0, x.shape[:2])


def backward(
    a: Args,
    dy: torch.Tensor,
    qkv: torch.Tensor,
    mixed: torch.Tensor,
    lse: torch.Tensor,
    needs: Mapping[str, bool] = EVERY,
    *,
    plus: torch.Tensor | None = None,
) -> Gradients:
    """`plus` is added to the gradient of x."""
    x = a.x
    of_out = {"x": True, "w": needs["w_out"], "bias": needs["b_out"]}
    dmixed, dw_out, db_out = of_product(dy, mixed, a.w_out, a.b_out, of_out)
    assert dmixed is not None
    q, k, v, out, dout = by_head(a.heads, *qkv.chunk(3, -1), mixed, dmixed)
    given = attended(q, k, v, _offsets(x), x.shape[1], a.causal)
    grads = attention.backward(given, dout, out, lse.flatten(0, 1))
    dqkv = torch.stack(grads[:3], 1).view(*x.shape[:2], a.w_in.shape[0])
    of_in = {"x": needs["x"], "w": needs["w_in"], "bias": needs["b_in"]}
    dx, dw_in, db_in = of_product(dqkv, x, a.w_in, a.b_in, of_in)
    return dx if dx is None or plus is None else dx + plus, dw_in, dw_out, db_in, db_out
