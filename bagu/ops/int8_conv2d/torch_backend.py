"""Convolution of int8 in PyTorch: exact sums by fp64 convolution, whose integers reach 2^53. torch has none of int8."""

from __future__ import annotations

import torch

from bagu.ops.activations import activate
from bagu.ops.contract.signature import accumulator
from bagu.ops.conv2d.torch_backend import convolved


def forward(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None,
    stride_h: int, stride_w: int, pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int,
    activation: str | None, dtype: str,
) -> tuple[torch.Tensor]:  # fmt: skip
    to = getattr(torch, dtype)
    acc = torch.promote_types(accumulator(to), accumulator(x_scale.dtype))
    steps = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
    z = convolved(x.double(), w.double(), None, *steps, groups).to(acc) * x_scale.to(acc) * w_scale.to(acc)
    return (activate(z if bias is None else z + bias.to(acc), activation).to(to),)
