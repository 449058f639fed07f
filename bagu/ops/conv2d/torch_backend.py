"""Convolution in PyTorch: cuDNN on a GPU, oneDNN on a CPU. Permuting to NCHW and back copies nothing.

On a CPU, 16-bit images are widened to fp32 and rounded once: torch's own 16-bit convolutions round partial sums. With
an activation they are widened on a GPU too: cuDNN rounds the convolution before the bias is added, and the sign of what
is left decides a ReLU's gradient. 16-bit values are exact in TF32, so there the product costs half the 16-bit rate.
fp32 images follow `torch.backends.cudnn.allow_tf32`, which is True unless the user sets it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.activations import activate, activation_backward

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """[B, H, W, C] as a view [B, C, H, W]."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] as a view [B, H, W, C]."""
    return x.permute(0, 2, 3, 1)


def _wide(x: torch.Tensor, activation: str | None = None) -> torch.dtype:
    widens = x.device.type == "cpu" or activation is not None
    return torch.float32 if widens and x.element_size() == 2 else x.dtype


def convolved(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, stride: tuple[int, int], pad: tuple[int, int],
    dilation: tuple[int, int], groups: int,
) -> torch.Tensor:  # fmt: skip
    y = F.conv2d(channels_first(x), channels_first(w), bias, stride, pad, dilation, groups)
    return channels_last(y)


def forward(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, stride_h: int, stride_w: int, pad_h: int, pad_w: int,
    dilation_h: int, dilation_w: int, groups: int, activation: str | None,
) -> tuple[torch.Tensor]:  # fmt: skip
    wide, steps = _wide(x, activation), ((stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w))
    if wide == x.dtype:
        return (activate(convolved(x, w, bias, *steps, groups), activation),)
    z = convolved(x.to(wide), w.to(wide), None if bias is None else bias.to(wide), *steps, groups)
    return (activate(z, activation).to(x.dtype),)


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


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, stride_h: int, stride_w: int,
    pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int, activation: str | None,
) -> Gradients:  # fmt: skip
    wide, steps = _wide(x, activation), ((stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w))
    dz = dy.to(wide)
    if activation is not None:
        z = convolved(x.to(wide), w.to(wide), None if bias is None else bias.to(wide), *steps, groups)
        dz = activation_backward(dz, z, activation)
    return gradients(dz, x, w, bias, *steps, groups)
