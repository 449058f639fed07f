"""The feed-forward block on a GPU, for few rows: two or three launches forward, four to six backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagu.ops.kernels.products import activated_gradient, input_gradient, linear, weight_gradients
from bagu.ops.mlp.spec import Args
from bagu.ops.mlp.torch_backend import EVERY, Gradients, Results


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def forward(a: Args, *, plus: torch.Tensor | None = None) -> Results:
    """`plus` is added to y."""
    x = a.x
    lead, (D, N) = x.shape[:-1], a.down.shape
    z, h, y = x.new_empty(*lead, N), x.new_empty(*lead, N), x.new_empty(*lead, D)
    u = x.new_empty(0) if a.gate is None else x.new_empty(*lead, N)
    rows, zs, hs = _rows(x), _rows(z), _rows(h)
    if a.gate is None:
        linear(rows, a.up, hs, bias=a.up_bias, z=zs, activation=a.activation)
    else:
        linear(rows, a.gate, zs)
        linear(rows, a.up, hs, bias=a.up_bias, z=_rows(u), gate=zs, activation=a.activation)
    linear(hs, a.down, _rows(y), bias=a.down_bias, residual=None if plus is None else _rows(plus))
    return y, z, u, h


def backward(
    a: Args,
    dy: torch.Tensor,
    z: torch.Tensor,
    u: torch.Tensor,
    h: torch.Tensor,
    needs: Mapping[str, bool] = EVERY,
    *,
    plus: torch.Tensor | None = None,
) -> Gradients:
    """`plus` is added to the gradient of x."""
    x, gate = a.x, a.gate
    dys, xs, zs, hs = (_rows(t) for t in (dy, x, z, h))
    ddown, ddown_bias = weight_gradients(dys, hs, a.down, a.down_bias, needs["down"], needs["down_bias"])
    du, dz = x.new_empty(hs.shape), None
    if gate is None:
        activated_gradient(dys, a.down, a.activation, zs, du)
    else:
        dz = x.new_empty(hs.shape)
        activated_gradient(dys, a.down, a.activation, zs, du, up=_rows(u), dgate=dz)
    dup, dup_bias = weight_gradients(du, xs, a.up, a.up_bias, needs["up"], needs["up_bias"])
    dgate = None if gate is None or dz is None else weight_gradients(dz, xs, gate, None, needs["gate"], False)[0]
    if not needs["x"]:
        return None, dup, ddown, dgate, dup_bias, ddown_bias
    dx = x.new_empty(xs.shape)
    input_gradient(du, a.up, dx, residual=None if plus is None else _rows(plus))
    if gate is not None and dz is not None:
        input_gradient(dz, gate, dx, residual=dx)
    return dx.view(x.shape), dup, ddown, dgate, dup_bias, ddown_bias
