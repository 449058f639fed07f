"""The attention block in PyTorch: the products of `matmul` around the torch backend of `attention`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bagu.ops.attention import torch_backend as attention
from bagu.ops.matmul.torch_backend import linear, of_product

EVERY = dict.fromkeys(("x", "w_in", "w_out", "b_in", "b_out"), True)
NO_TERMS: Mapping[str, Any] = {
    "slopes": None,
    "bias": None,
    "sinks": None,
    "window": None,
    "scale": None,
    "softcap": None,
}
Results = tuple[torch.Tensor, ...]
Gradients = tuple[torch.Tensor | None, ...]


def by_head(heads: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors [B, S, N] as [T, H, D]."""
    return [t.flatten(0, 1).unflatten(-1, (heads, -1)) for t in tensors]


def _offsets(x: torch.Tensor) -> torch.Tensor:
    """Where each of the sequences x[B, S, K] begins."""
    return x.shape[1] * torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device)


def forward(
    x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, b_in: torch.Tensor | None, b_out: torch.Tensor | None,
    heads: int, causal: bool,
) -> Results:  # fmt: skip
    qkv = linear(x, w_in, b_in)
    q, k, v = by_head(heads, *qkv.chunk(3, -1))
    out, lse = attention.forward(q, k, v, cu_seqlens=_offsets(x), max_len=x.shape[1], causal=causal, **NO_TERMS)
    mixed = out.reshape(*x.shape[:2], w_out.shape[1])
    return linear(mixed, w_out, b_out), qkv, mixed, lse.unflatten(0, x.shape[:2])


def backward(
    dy: torch.Tensor, x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, b_in: torch.Tensor | None,
    b_out: torch.Tensor | None, qkv: torch.Tensor, mixed: torch.Tensor, lse: torch.Tensor, heads: int,
    causal: bool, needs: Mapping[str, bool] = EVERY, *, plus: torch.Tensor | None = None,
) -> Gradients:  # fmt: skip
    """`plus` is added to the gradient of x."""
    of_out = {"x": True, "w": needs["w_out"], "bias": needs["b_out"]}
    dmixed, dw_out, db_out = of_product(dy, mixed, w_out, b_out, of_out)
    assert dmixed is not None
    q, k, v, out, dout = by_head(heads, *qkv.chunk(3, -1), mixed, dmixed)
    grads = attention.backward(
        dout, q, k, v, out=out, lse=lse.flatten(0, 1), cu_seqlens=_offsets(x), max_len=x.shape[1], causal=causal,
        **NO_TERMS,
    )  # fmt: skip
    dqkv = torch.stack(grads[:3], 1).view(*x.shape[:2], w_in.shape[0])
    of_in = {"x": needs["x"], "w": needs["w_in"], "bias": needs["b_in"]}
    dx, dw_in, db_in = of_product(dqkv, x, w_in, b_in, of_in)
    return dx if dx is None or plus is None else dx + plus, dw_in, dw_out, db_in, db_out
