"""Convolution of int8 on Triton: conv2d's kernels with int32 sums, and the scales in the epilogue."""

from __future__ import annotations

import torch

from bagu.ops.conv2d.tiles import Steps
from bagu.ops.conv2d.triton_backend import convolve


def forward(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None,
    stride_h: int, stride_w: int, pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int,
    activation: str | None, dtype: str,
) -> tuple[torch.Tensor]:  # fmt: skip
    steps = Steps(stride=(stride_h, stride_w), pad=(pad_h, pad_w), dilation=(dilation_h, dilation_w))
    return (convolve(x, w, bias, steps, groups, activation, (x_scale, w_scale), getattr(torch, dtype)),)
