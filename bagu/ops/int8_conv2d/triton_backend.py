"""Convolution of int8 on Triton: conv2d's kernels with int32 sums, and the scales in the epilogue."""

from __future__ import annotations

import torch

from bagu.ops.conv2d.tiles import Steps
from bagu.ops.conv2d.triton_backend import convolve
from bagu.ops.int8_conv2d.spec import Args


def forward(a: Args) -> tuple[torch.Tensor]:
    steps = Steps(stride=(a.stride_h, a.stride_w), pad=(a.pad_h, a.pad_w), dilation=(a.dilation_h, a.dilation_w))
    return (convolve(a.x, a.w, a.bias, steps, a.groups, a.activation, (a.x_scale, a.w_scale), getattr(torch, a.dtype)),)
