"""Convolution of int8 images with an int8 weight. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.conv2d import Size, arguments
from bagu.ops.int8_conv2d.spec import SPEC

__all__ = ["int8_conv2d"]


def int8_conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    x_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> torch.Tensor:
    """act(x_scale * w_scale[o] * conv2d(x, w) + bias) in `dtype`, of int8 x[B, C, H, W] and w[O, C / groups, R, S].

    x has one scale [1], w one per output channel [O]. The result is channels last in memory. No gradient.
    """
    images = arguments("int8_conv2d", x, w, stride, padding, dilation)
    y: torch.Tensor = call(
        SPEC,
        backend,
        **images,
        x_scale=x_scale,
        w_scale=w_scale,
        bias=bias,
        groups=groups,
        activation=activation,
        dtype=str(dtype).removeprefix("torch."),
    )
    return y.permute(0, 3, 1, 2)
