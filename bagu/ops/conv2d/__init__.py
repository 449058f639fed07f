"""Convolution. spec.py has the definition and the cost."""

from typing import Any

import torch

from bagu.errors import ArgumentError
from bagu.ops.call.dispatch import call
from bagu.ops.conv2d.spec import SPEC
from bagu.ops.transpose import transpose

__all__ = ["Size", "arguments", "conv1d", "conv2d"]

Size = int | tuple[int, int]


def arguments(
    op: str, x: torch.Tensor, w: torch.Tensor, stride: Size, padding: Size | str, dilation: Size
) -> dict[str, Any]:
    """The arguments that the signatures of `conv2d` and `int8_conv2d` share: channels last, a number per axis."""
    _check_images(op, x, w)
    stride, dilation = _as_pair(op, "stride", stride), _as_pair(op, "dilation", dilation)
    pad = _as_padding(op, padding, w, stride, dilation)
    return {
        "x": x.permute(0, 2, 3, 1),
        "w": w.permute(0, 2, 3, 1),
        "stride_h": stride[0],
        "stride_w": stride[1],
        "pad_h": pad[0],
        "pad_w": pad[1],
        "dilation_h": dilation[0],
        "dilation_w": dilation[1],
    }


def _check_images(op: str, x: object, w: object) -> None:
    """Raise if x and w are not tensors of four dims."""
    for name, value in (("x", x), ("w", w)):
        if not isinstance(value, torch.Tensor) or value.ndim != 4:
            given = f"has {value.ndim} dims" if isinstance(value, torch.Tensor) else f"is {type(value).__name__}"
            raise ArgumentError(f"{op}: {name} {given}, expected 4 dims: x[B, C, H, W] and w[O, C / groups, R, S]")


def _as_pair(op: str, name: str, value: Size) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2:
        raise ArgumentError(f"{op}: {name} is {value}, expected a number or a pair of numbers for H and W")
    return pair[0], pair[1]


def _as_padding(
    op: str, padding: Size | str, w: torch.Tensor, stride: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int]:
    if not isinstance(padding, str):
        return _as_pair(op, "padding", padding)
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    if padding == "valid":
        return 0, 0
    if padding != "same" or stride != (1, 1) or any(n % 2 for n in reach):
        raise ArgumentError(
            f'{op}: padding is "{padding}" with stride {stride} and a kernel that covers {[n + 1 for n in reach]}',
            hint='"same" needs stride 1 and a kernel that covers an odd number of pixels; otherwise pass numbers',
        )
    return reach[0] // 2, reach[1] // 2


def conv2d(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """act(F.conv2d(x, w, bias, stride, padding, dilation, groups)) of x[B, C, H, W] and w[O, C / groups, R, S].

    The result has the memory format of x: channels last (the fast one) or channels first. `activation` is None, "gelu"
    (exact), "silu" or "relu".
    """
    images = arguments("conv2d", x, w, stride, padding, dilation)
    y: torch.Tensor = call(SPEC, backend, **images, bias=bias, groups=groups, activation=activation)
    first = y.permute(0, 3, 1, 2)
    if not x.is_contiguous() or first.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last):
        return first
    return transpose(y.flatten(1, 2), 1, 2, backend=backend).view(first.shape)


def conv1d(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    *,
    activation: str | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """act(F.conv1d(…)) of x[B, C, W] and w[O, C / groups, S]: `conv2d` of an image of one row."""
    if not (isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor) and x.ndim == w.ndim == 3):
        raise ArgumentError(
            "conv1d: x and w are not two tensors of 3 dims, expected x[B, C, W] and w[O, C / groups, S]"
        )
    y = conv2d(
        x.unsqueeze(2),
        w.unsqueeze(2),
        bias,
        (1, stride),
        (0, padding),
        (1, dilation),
        groups,
        activation=activation,
        backend=backend,
    )
    return y.squeeze(2)
