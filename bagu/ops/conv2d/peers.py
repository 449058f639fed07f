"""Other implementations of convolution, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate


def eager(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, stride_h: int, stride_w: int, pad_h: int, pad_w: int,
    dilation_h: int, dilation_w: int, groups: int, activation: str | None,
) -> torch.Tensor:  # fmt: skip
    """cuDNN on a GPU, with the fastest algorithm for these sizes."""
    torch.backends.cudnn.benchmark = True
    steps = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
    y = F.conv2d(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), bias, *steps, groups)
    return activate(y.permute(0, 2, 3, 1), activation)
