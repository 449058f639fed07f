"""The linear layer: y = x Wᵀ + b, W as [out, in]. Every matmul with a weight goes through it, so FLOPs can be counted.

A weight may have two additions: weight normalization (W = gain * V / |V|, per row; https://arxiv.org/abs/1602.07868)
and LoRA (W + scale * B A; https://arxiv.org/abs/2106.09685, added by nn/lora.py). A frozen weight may be int8, and a
layer may train in fp8 (nn/fp8.py).
"""

from typing import TypedDict, Unpack

import torch
from torch import nn

from bagu import ops
from bagu.nn.fp8 import Rounded, fp8_linear
from bagu.nn.int8 import int8_matmul


class Factory(TypedDict, total=False):
    """Device and dtype of a module's parameters."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def parameter(*shape: int, **factory: Unpack[Factory]) -> nn.Parameter:
    """A parameter filled with NaN: if weights are neither initialized nor loaded, the first loss is NaN."""
    return nn.Parameter(torch.full(shape, float("nan"), device=factory.get("device"), dtype=factory.get("dtype")))


class Linear(nn.Module):
    weight: nn.Parameter
    weight_scale: nn.Parameter | None  # [out] fp32: the size of a step of an int8 weight, per row
    bias: nn.Parameter | None
    gain: nn.Parameter | None  # length of each row, with weight normalization
    lora_a: nn.Parameter | None  # [rank, in]
    lora_b: nn.Parameter | None  # [out, rank]
    rounded: Rounded | None  # the weight in fp8, if the layer trains with it

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        weight_norm: bool = False,
        **factory: Unpack[Factory],
    ) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, **factory)
        self.bias = parameter(out_features, **factory) if bias else None
        self.gain = parameter(out_features, **factory) if weight_norm else None
        self.weight_scale = self.lora_a = self.lora_b = None
        self.lora_scale = 0.0
        self.rounded = None
        self._dtype = self.weight.dtype

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the layer's products: that of the weight, or of the weight before it was int8."""
        return self.weight.dtype if self.weight_scale is None else self._dtype

    @property
    def is_plain(self) -> bool:
        """Whether the product is with `weight` itself."""
        return self.weight_scale is None and self.gain is None and self.lora_a is None

    @torch.no_grad()
    def quantize(self) -> None:
        """Round the weight to int8, with a scale per row, and freeze it."""
        self._dtype = self.weight.dtype
        q, scale = ops.quantize_int8(self.weight)
        self.weight, self.weight_scale = nn.Parameter(q, False), nn.Parameter(scale, False)

    @torch.no_grad()
    def merge(self) -> None:
        """Make `merged()` the weight: add LoRA to it, dequantize it."""
        if self.weight_scale is None:
            self.weight.copy_(self.merged())
        else:
            self.weight = nn.Parameter(self.merged(), False)
        self.weight_scale = self.lora_a = self.lora_b = None

    def matrix(self) -> torch.Tensor:
        """The weight without LoRA: the parameter itself, dequantized, or its rows scaled to their learned lengths."""
        if self.weight_scale is not None:
            return ops.dequantize_int8(self.weight, self.weight_scale, dtype=self.dtype)
        if self.gain is None:
            return self.weight
        acc = torch.promote_types(self.weight.dtype, torch.float32)
        v = self.weight.to(acc)
        return (v * (self.gain.to(acc) / v.norm(dim=1)).unsqueeze(1)).to(self.weight.dtype)

    def merged(self) -> torch.Tensor:
        """The weight with LoRA, summed in fp32 and rounded once."""
        w = self.matrix()
        if self.lora_a is None or self.lora_b is None:
            return w
        acc = torch.promote_types(w.dtype, torch.float32)
        return (w.to(acc) + self.lora_scale * (self.lora_b.to(acc) @ self.lora_a.to(acc))).to(w.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.rounded is not None and self.training:
            y = fp8_linear(x, self.weight, self.rounded, self.bias)
        elif self.weight_scale is None:
            y = ops.matmul(x, self.matrix(), self.bias)
        else:
            y = int8_matmul(x, self.weight, self.weight_scale, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + ops.matmul(ops.matmul(x, self.lora_a) * self.lora_scale, self.lora_b)

    def extra_repr(self) -> str:
        more = "".join(
            f", {name}" for name in ("bias", "gain", "weight_scale", "lora_a") if getattr(self, name) is not None
        )
        return f"{self.in_features} -> {self.out_features}{more}"


def linears_of(model: nn.Module) -> dict[str, Linear]:
    """The linear layers of a model by name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}
