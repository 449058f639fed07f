"""The feed-forward block in PyTorch: the products of `matmul`, and an activation between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagu.ops.activations import activate, activation_backward
from bagu.ops.contract.signature import accumulator
from bagu.ops.matmul.torch_backend import linear, of_product
from bagu.ops.mlp.spec import Args
from bagu.ops.swiglu import swiglu

EVERY = dict.fromkeys(("x", "up", "down", "gate", "up_bias", "down_bias"), True)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor | None, ...]


def forward(a: Args, *, plus: torch.Tensor | None = None) -> Results:
    """`plus` is added to y."""
    x, gate = a.x, a.gate
    u = linear(x, a.up, a.up_bias)
    z = u if gate is None else linear(x, gate, None)
    if gate is None:
        h = activate(z.to(accumulator(x.dtype)) if x.is_cpu else z, a.activation).to(x.dtype)  # one rounding
    elif a.activation == "silu":
        h = swiglu(z, u)
    else:
        h = (activate(z.to(accumulator(x.dtype)), a.activation) * u).to(x.dtype)
    y = linear(h, a.down, a.down_bias)
    return y if plus is None else y + plus, z, x.new_empty(0) if gate is None else u, h


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
    x = a.x
    of_down = {"x": True, "w": needs["down"], "bias": needs["down_bias"]}
    dh, ddown, ddown_bias = of_product(dy, h, a.down, a.down_bias, of_down)
    assert dh is not None
    acc = accumulator(x.dtype)
    dh, z = dh.to(acc), z.to(acc)
    of_up = {"x": needs["x"], "w": needs["up"], "bias": needs["up_bias"]}
    if a.gate is None:
        dz = activation_backward(dh, z, a.activation).to(x.dtype)
        dx, dup, dup_bias = of_product(dz, x, a.up, a.up_bias, of_up)
        return dx if dx is None or plus is None else dx + plus, dup, ddown, None, dup_bias, ddown_bias
    dx, dup, dup_bias = of_product((dh * activate(z, a.activation)).to(x.dtype), x, a.up, a.up_bias, of_up)
    dgated = activation_backward(dh * u.to(acc), z, a.activation).to(x.dtype)
    more, dgate, _ = of_product(dgated, x, a.gate, None, {"x": needs["x"], "w": needs["gate"]})
    return None if dx is None or more is None else dx + more, dup, ddown, dgate, dup_bias, ddown_bias
