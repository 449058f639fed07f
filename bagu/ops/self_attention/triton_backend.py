"""The attention block on a GPU, for few rows: products of kernels/products.py around the kernels of `attention`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagu.ops.attention import triton_backend as attention
from bagu.ops.kernels.products import input_gradient, linear, weight_gradients
from bagu.ops.self_attention.spec import Args
from bagu.ops.self_attention.torch_backend import EVERY, Gradients, Results, attended, by_head


def forward(a: Args) -> Results:
    x = a.x
    (B, S, K), P, (D, N) = x.shape, a.w_in.shape[0], a.w_out.shape
    qkv, y = x.new_empty(B, S, P), x.new_empty(B, S, D)
    linear(x.reshape(B * S, K), a.w_in, qkv.view(B * S, P), bias=a.b_in)
    q, k, v = by_head(a.heads, *qkv.chunk(3, -1))
    mixed, lse = attention.forward(attended(q, k, v, None, S, a.causal))
    linear(mixed.view(B * S, N), a.w_out, y.view(B * S, D), bias=a.b_out)
    return y, qkv, mixed.view(B, S, N), lse.unflatten(0, (B, S))


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
    (B, S, K), (D, N) = x.shape, a.w_out.shape
    T = B * S
    dys, xs, mixes = dy.reshape(T, D), x.reshape(T, K), mixed.reshape(T, N)
    dw_out, db_out = weight_gradients(dys, mixes, a.w_out, a.b_out, needs["w_out"], needs["b_out"])
    dmixed, dqkv = x.new_empty(B, S, N), x.new_empty(B, S, 3 * N)
    input_gradient(dys, a.w_out, dmixed.view(T, N))
    q, k, v, out, dout, *into = by_head(a.heads, *qkv.chunk(3, -1), mixed, dmixed, *dqkv.chunk(3, -1))
    attention.backward(attended(q, k, v, None, S, a.causal), dout, out, lse.flatten(0, 1), into=into)
    dqkvs = dqkv.view(T, 3 * N)
    dw_in, db_in = weight_gradients(dqkvs, xs, a.w_in, a.b_in, needs["w_in"], needs["b_in"])
    if not needs["x"]:
        return None, dw_in, dw_out, db_in, db_out
    dx = x.new_empty(B, S, K)
    input_gradient(dqkvs, a.w_in, dx.view(T, K), residual=None if plus is None else plus.reshape(T, K))
    return dx, dw_in, dw_out, db_in, db_out
