"""The attention block on a GPU, for few rows: products of kernels/products.py around the kernels of `attention`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagu.ops.attention import triton_backend as attention
from bagu.ops.kernels.products import input_gradient, linear, weight_gradients
from bagu.ops.self_attention.torch_backend import EVERY, NO_TERMS, Gradients, Results, by_head


def forward(
    x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, b_in: torch.Tensor | None, b_out: torch.Tensor | None,
    heads: int, causal: bool,
) -> Results:  # fmt: skip
    (B, S, K), P, (D, N) = x.shape, w_in.shape[0], w_out.shape
    qkv, y = x.new_empty(B, S, P), x.new_empty(B, S, D)
    linear(x.reshape(B * S, K), w_in, qkv.view(B * S, P), bias=b_in)
    q, k, v = by_head(heads, *qkv.chunk(3, -1))
    mixed, lse = attention.forward(q, k, v, cu_seqlens=None, max_len=S, causal=causal, **NO_TERMS)
    linear(mixed.view(B * S, N), w_out, y.view(B * S, D), bias=b_out)
    return y, qkv, mixed.view(B, S, N), lse.unflatten(0, (B, S))


def backward(
    dy: torch.Tensor, x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, b_in: torch.Tensor | None,
    b_out: torch.Tensor | None, qkv: torch.Tensor, mixed: torch.Tensor, lse: torch.Tensor, heads: int,
    causal: bool, needs: Mapping[str, bool] = EVERY, *, plus: torch.Tensor | None = None,
) -> Gradients:  # fmt: skip
    """`plus` is added to the gradient of x."""
    (B, S, K), (D, N) = x.shape, w_out.shape
    T = B * S
    dys, xs, mixes = dy.reshape(T, D), x.reshape(T, K), mixed.reshape(T, N)
    dw_out, db_out = weight_gradients(dys, mixes, w_out, b_out, needs["w_out"], needs["b_out"])
    dmixed, dqkv = x.new_empty(B, S, N), x.new_empty(B, S, 3 * N)
    input_gradient(dys, w_out, dmixed.view(T, N))
    q, k, v, out, dout, *into = by_head(heads, *qkv.chunk(3, -1), mixed, dmixed, *dqkv.chunk(3, -1))
    attention.backward(
        dout, q, k, v, out=out, lse=lse.flatten(0, 1), cu_seqlens=None, max_len=S, causal=causal, **NO_TERMS, into=into
    )
    dqkvs = dqkv.view(T, 3 * N)
    dw_in, db_in = weight_gradients(dqkvs, xs, w_in, b_in, needs["w_in"], needs["b_in"])
    if not needs["x"]:
        return None, dw_in, dw_out, db_in, db_out
    dx = x.new_empty(B, S, K)
    input_gradient(dqkvs, w_in, dx.view(T, K), residual=None if plus is None else plus.reshape(T, K))
    return dx, dw_in, dw_out, db_in, db_out
