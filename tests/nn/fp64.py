"""Compare two implementations by their errors against the same computation in fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["assert_as_accurate", "results"]


def results(
    model: nn.Module, x: torch.Tensor, run: Callable[[nn.Module, torch.Tensor], Any] | None = None
) -> dict[str, torch.Tensor]:
    """The outputs of one call, and the gradients of x (if it is floating point) and of every parameter."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    out = model(x) if run is None else run(model, x)
    outputs = {
        f"output {i}": t for i, t in enumerate(out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor)
    }
    model.zero_grad()
    weights = [torch.cos(torch.arange(t.numel(), dtype=torch.float64)).view(t.shape).to(t) for t in outputs.values()]
    torch.autograd.backward([(t * w).sum() for t, w in zip(outputs.values(), weights, strict=True)])
    gradients = {f"gradient of {k}": p.grad for k, p in model.named_parameters() if p.grad is not None}
    if x.grad is not None:
        gradients["gradient of x"] = x.grad
    return {k: v.detach().clone() for k, v in (outputs | gradients).items()}


def assert_as_accurate(
    got: Mapping[str, torch.Tensor], peer: Mapping[str, torch.Tensor], want: Mapping[str, torch.Tensor]
) -> None:
    """Assert that the error of `got` is at most twice that of `peer`, plus four roundings of the largest value."""
    assert got.keys() == peer.keys() == want.keys()
    for name, exact in want.items():
        assert got[name].dtype == peer[name].dtype and got[name].shape == exact.shape
        errors = [(t.double() - exact).abs().max().item() for t in (got[name], peer[name])]
        rounding = exact.abs().max().item() * torch.finfo(peer[name].dtype).eps
        assert errors[0] <= 2 * errors[1] + 4 * rounding, f"{name}: error {errors[0]:.3g}, torch's {errors[1]:.3g}"
