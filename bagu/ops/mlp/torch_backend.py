"""The feed-forward block in PyTorch: the products of `matmul`, and an activation between them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bagu.ops.activations import activate, activation_backward
from bagu.ops.contract.signature import accumulator
from bagu.ops.matmul.torch_backend import linear, of_product
from bagu.ops.swiglu import swiglu

EVERY = dict.fromkeys(("x", "up", "down", "gate", "up_bias", "down_bias"), True)
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor | None, ...]


def forward(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate: torch.Tensor | None, up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None, activation: str, *, plus: torch.Tensor | None = None,
) -> Results:  # fmt: skip
    """`plus` is added to y."""
    u = linear(x, up, up_bias)
    z = u if gate is None else linear(x, gate, None)
    if gate is None:
        h = activate(z.to(accumulator(x.dtype)) if x.is_cpu else z, activation).to(x.dtype)  # one rounding
    elif activation == "silu":
        h = swiglu(z, u)
    else:
        h = (activate(z.to(accumulator(x.dtype)), activation) * u).to(x.dtype)
    y = linear(h, down, down_bias)
    return y if plus is None else y + plus, z, x.new_empty(0) if gate is None else u, h


def backward(
    dy: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate: torch.Tensor | None,
    up_bias: torch.Tensor | None, down_bias: torch.Tensor | None, z: torch.Tensor, u: torch.Tensor, h: torch.Tensor,
    activation: str, needs: Mapping[str, bool] = EVERY, *, plus: torch.Tensor | None = None,
) -> Gradients:  # fmt: skip
    """`plus` is added to the gradient of x."""
    of_down = {"x": True, "w": needs["down"], "bias": needs["down_bias"]}
    dh, ddown, ddown_bias = of_product(dy, h, down, down_bias, of_down)
    assert dh is not None
    acc = accumulator(x.dtype)
    dh, z = dh.to(acc), z.to(acc)
    of_up = {"x": needs["x"], "w": needs["up"], "bias": needs["up_bias"]}
    if gate is None:
        dz = activation_backward(dh, z, activation).to(x.dtype)
        dx, dup, dup_bias = of_product(dz, x, up, up_bias, of_up)
        return dx if dx is None or plus is None else dx + plus, dup, ddown, None, dup_bias, ddown_bias
    dx, dup, dup_bias = of_product((dh * activate(z, activation)).to(x.dtype), x, up, up_bias, of_up)
    dgated = activation_backward(dh * u.to(acc), z, activation).to(x.dtype)
    more, dgate, _ = of_product(dgated, x, gate, None, {"x": needs["x"], "w": needs["gate"]})
    return None if dx is None or more is None else dx + more, dup, ddown, dgate, dup_bias, ddown_bias
