"""Dynamic int8 on a CPU (W8A8): weights are rounded once, a scale a row; activations at each call, a scale a call.

A decode step reads every weight once, so a quarter of the bytes is most of a quarter of the time: 1536 x 576 with one
row 147 -> 35 us, the head of a 49152-word vocabulary 4.9 -> 1.3 ms (two cores). A product is off by 1 % (rms) of its
size. Logits change, so greedy text may: parity with the trainer is for fp32 and bf16.
"""

from __future__ import annotations

import copy
import warnings

import torch
from torch import nn

from bagu.errors import BackendError
from bagu.nn.linear import Linear
from bagu.nn.model import Transformer
from bagu.nn.moe import Router

__all__ = ["Int8", "quantized"]


class Int8:
    """y = x Wᵀ + b with W in int8; satisfies packed.Packed."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.device.type != "cpu" or torch.backends.quantized.engine == "none":
            raise BackendError(
                f"int8 was asked for, and the weights are on {weight.device.type}, where torch has no dynamic int8",
                hint="serve on a CPU, or leave quantization out",
            )
        w = weight.detach().float()
        scales = w.abs().amax(1).clamp_(min=1e-12).double() / 127
        zeros = torch.zeros(len(w), dtype=torch.int64)
        with warnings.catch_warnings():  # torch points to torchao, which is not a dependency
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(w, scales, zeros, 0, torch.qint8)
            self.weight = torch.ops.quantized.linear_prepack(rounded, None if bias is None else bias.detach().float())
        self.dtype = weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_dynamic(x.float(), self.weight, False)
        return y.to(self.dtype)

    def add(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self(x).add_(residual)


class Int8Linear(nn.Module):
    """In the place of a `Linear` of a model that is not changed otherwise."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.int8 = Int8(linear.merged(), linear.bias)
        self.merged = linear.merged  # MLA folds a weight into its neighbours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.int8(x)


def quantized(model: Transformer) -> Transformer:
    """The same model with int8 in its linear layers; everything else is shared. Routers keep their dtype: a rounded
    score is another choice of expert. Experts do too: they are not `Linear`."""
    return _swap(model)  # type: ignore[return-value]


def _swap(module: nn.Module) -> nn.Module:
    if isinstance(module, Linear) and not isinstance(module, Router):
        return Int8Linear(module)
    twin = copy.copy(module)
    twin._modules = {name: None if m is None else _swap(m) for name, m in module._modules.items()}
    return twin
