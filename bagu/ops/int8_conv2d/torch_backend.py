"""Convolution of int8 in PyTorch: exact sums by fp64 convolution, whose integers reach 2^53. torch has none of int8."""

from __future__ import annotations

import torch

from bagu.ops.activations import activate
from bagu.ops.contract.signature import accumulator
from bagu.ops.conv2d.spec import convolved
from bagu.ops.int8_conv2d.spec import Args


def forward(a: Args) -> tuple[torch.Tensor]:
    to = getattr(torch, a.dtype)
    acc = torch.promote_types(accumulator(to), accumulator(a.x_scale.dtype))
    steps = (a.stride_h, a.stride_w), (a.pad_h, a.pad_w), (a.dilation_h, a.dilation_w)
    z = convolved(a.x.double(), a.w.double(), None, *steps, a.groups).to(acc) * a.x_scale.to(acc) * a.w_scale.to(acc)
    return (activate(z if a.bias is None else z + a.bias.to(acc), a.activation).to(to),)
