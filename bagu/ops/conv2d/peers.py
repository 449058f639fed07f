"""Other implementations of convolution, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate
from bagu.ops.conv2d.spec import Args


def eager(a: Args) -> torch.Tensor:
    """cuDNN on a GPU, with the fastest algorithm for these sizes."""
    torch.backends.cudnn.benchmark = True
    steps = (a.stride_h, a.stride_w), (a.pad_h, a.pad_w), (a.dilation_h, a.dilation_w)
    y = F.conv2d(a.x.permute(0, 3, 1, 2), a.w.permute(0, 3, 1, 2), a.bias, *steps, a.groups)
    return activate(y.permute(0, 2, 3, 1), a.activation)
