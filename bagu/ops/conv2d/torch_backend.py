"""Convolution in PyTorch: cuDNN on a GPU, oneDNN on a CPU. Permuting to NCHW and back copies nothing.

On a CPU, 16-bit images are widened to fp32 and rounded once: torch's own 16-bit convolutions round partial sums. With
an activation they are widened on a GPU too: cuDNN rounds the convolution before the bias is added, and the sign of what
is left decides a ReLU's gradient. 16-bit values are exact in TF32, so there the product costs half the 16-bit rate.
fp32 images follow `torch.backends.cudnn.allow_tf32`, which is True unless the user sets it.
"""

from __future__ import annotations

import torch

from bagu.ops.activations import activate, activation_backward
from bagu.ops.conv2d.spec import Args, channels_first, channels_last, convolved

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _wide(x: torch.Tensor, activation: str | None = None) -> torch.dtype:
    widens = x.device.type == "cpu" or activation is not None
    return torch.float32 if widens and x.element_size() == 2 else x.dtype


def forward(a: Args) -> tuple[torch.Tensor]:
    x = a.x
    wide, steps = _wide(x, a.activation), ((a.stride_h, a.stride_w), (a.pad_h, a.pad_w), (a.dilation_h, a.dilation_w))
    if wide == x.dtype:
        return (activate(convolved(x, a.w, a.bias, *steps, a.groups), a.activation),)
    z = convolved(x.to(wide), a.w.to(wide), None if a.bias is None else a.bias.to(wide), *steps, a.groups)
    return (activate(z, a.activation).to(x.dtype),)


def gradients(
    dz: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, stride: tuple[int, int],
    pad: tuple[int, int], dilation: tuple[int, int], groups: int, *, data: bool = True,
) -> Gradients:  # fmt: skip
    """The gradients of x (None without `data`), w and bias, of the convolution without an activation."""
    wide, shape = _wide(x), None if bias is None else list(bias.shape)
    found = torch.ops.aten.convolution_backward(
        channels_first(dz.to(wide)), channels_first(x.to(wide)), channels_first(w.to(wide)), shape, list(stride),
        list(pad), list(dilation), False, [0, 0], groups, [data, True, bias is not None],
    )  # fmt: skip
    dx, dw = (None if g is None else channels_last(g).to(x.dtype) for g in found[:2])
    return dx, dw, None if found[2] is None or bias is None else found[2].to(bias.dtype)


def backward(a: Args, dy: torch.Tensor) -> Gradients:
    wide, steps = _wide(a.x, a.activation), ((a.stride_h, a.stride_w), (a.pad_h, a.pad_w), (a.dilation_h, a.dilation_w))
    dz = dy.to(wide)
    if a.activation is not None:
        z = convolved(a.x.to(wide), a.w.to(wide), None if a.bias is None else a.bias.to(wide), *steps, a.groups)
        dz = activation_backward(dz, z, a.activation)
    return gradients(dz, a.x, a.w, a.bias, *steps, a.groups)
