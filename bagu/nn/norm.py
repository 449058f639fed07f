"""The norms of a block: one module per kind. Each can also include the residual add before it.

`norm(x)` is the norm; `norm.add(delta, x)` is `(norm(x + delta), x + delta)`, one pass for RMSNorm on a GPU.
"""

from typing import Unpack

import torch
from torch import nn

from bagu import ops
from bagu.nn.config import NormConfig
from bagu.nn.linear import Factory, parameter


class Norm(nn.Module):
    """Base class: the gain and the residual add."""

    def __init__(self, size: int, eps: float, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def add(self, delta: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + delta), x + delta); a delta of None adds nothing."""
        s = x if delta is None else x + delta
        return self(s), s


class RMSNorm(Norm):
    def __init__(self, size: int, eps: float, *, unit_offset: bool = False, **factory: Unpack[Factory]) -> None:
        super().__init__(size, eps, **factory)
        self.unit_offset = unit_offset

    @property
    def gain(self) -> torch.Tensor:
        """The weight, or 1 + weight in fp32: a bf16 sum would round most of a small weight away."""
        if not self.unit_offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.gain, self.eps)

    def add(self, delta: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self(x), x) if delta is None else ops.add_rms_norm(delta, x, self.gain, self.eps)


class ScaleNorm(Norm):
    """One gain for all features."""

    def __init__(self, eps: float, **factory: Unpack[Factory]) -> None:
        super().__init__(1, eps, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.scale_norm(x, self.weight, self.eps)


class LayerNorm(Norm):
    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, *, bias: bool, **factory: Unpack[Factory]) -> None:
        super().__init__(size, eps, **factory)
        self.bias = parameter(size, **factory) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class GroupNorm(LayerNorm):
    """Each group of size / groups features of a token is normalized separately."""

    def __init__(self, size: int, eps: float, groups: int, *, bias: bool, **factory: Unpack[Factory]) -> None:
        super().__init__(size, eps, bias=bias, **factory)
        self.groups = groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.group_norm(x, self.groups, self.weight, self.bias, self.eps)


class BatchNorm(LayerNorm):
    """Normalizes each feature over the tokens of the batch in training, and with running statistics otherwise.

    The statistics mix information between the tokens of a batch, including later tokens and other documents.
    """

    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, size: int, eps: float, *, bias: bool, **factory: Unpack[Factory]) -> None:
        super().__init__(size, eps, bias=bias, **factory)
        acc = torch.promote_types(self.weight.dtype, torch.float32)
        self.register_buffer("mean", torch.zeros(size, device=self.weight.device, dtype=acc))
        self.register_buffer("var", torch.ones(size, device=self.weight.device, dtype=acc))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, mean, var = ops.batch_norm(
            x, self.weight, self.bias, self.mean, self.var, training=self.training, eps=self.eps
        )
        if self.training:
            with torch.no_grad():
                self.mean.copy_(mean)
                self.var.copy_(var)
        return y


def make_norm(config: NormConfig, size: int, **factory: Unpack[Factory]) -> Norm:
    """The norm of `size` features that the config selects."""
    match config.kind:
        case "rms":
            return RMSNorm(size, config.eps, unit_offset=config.unit_offset, **factory)
        case "scale":
            return ScaleNorm(config.eps, **factory)
        case "layer":
            return LayerNorm(size, config.eps, bias=config.bias, **factory)
        case "group":
            assert config.groups is not None, "NormConfig requires groups for group norm"
            return GroupNorm(size, config.eps, config.groups, bias=config.bias, **factory)
        case "batch":
            return BatchNorm(size, config.eps, bias=config.bias, **factory)
