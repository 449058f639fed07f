"""Convolution on Triton: an implicit matrix product.

On Hopper, 16-bit and int8 images without stride or groups, with channels in multiples of 128 bytes, are read by TMA
(`hopper_kernel`). Everything else is read through pointers. The gradient of the data is the same convolution with the
weight flipped and its channels swapped, where there is no stride. Other gradients of the data, and those of the weight,
are torch's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.activations import activation_backward
from bagu.ops.conv2d.hopper_kernel import hopper_kernel
from bagu.ops.conv2d.pointer_kernel import pointer_kernel
from bagu.ops.conv2d.spec import Args, channels_first
from bagu.ops.conv2d.tiles import Box, Steps, box_of, boxes
from bagu.ops.conv2d.torch_backend import Gradients, gradients
from bagu.ops.kernels.launch import is_hopper, next_power_of_2, num_sms, triton_acc
from bagu.ops.replay.launcher import with_scratch_memory
from bagu.ops.transpose import triton_backend as transposition

Scales = tuple[torch.Tensor, torch.Tensor]


def as_nhwc(x: torch.Tensor) -> torch.Tensor:
    """x [B, H, W, C], contiguous. Channels that come first in memory are moved by the transpose kernel."""
    first = channels_first(x)
    if x.is_contiguous() or not first.is_contiguous():
        return x.contiguous()
    return transposition.forward(first.flatten(2), 1, 2)[0].view(x.shape)


def convolve(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    steps: Steps,
    groups: int,
    activation: str | None,
    scales: Scales | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """y [B, P, Q, O] in `dtype`, or that of x. The `scales` of x [1] and w [O] multiply sums of int8."""
    if w.shape[1:3] == (1, 1) and steps.pad == (0, 0):  # one tap: the pixels that a stride skips are not read
        x = x[:, :: steps.stride[0], :: steps.stride[1]]
        steps = Steps(stride=(1, 1), pad=(0, 0), dilation=(1, 1))
    y = x.new_empty(x.shape[0], *steps.out(x.shape[1:3], w.shape[1:3]), w.shape[0], dtype=dtype or x.dtype)
    if not y.numel():
        return y
    x, w, bias = as_nhwc(x), w.contiguous(), None if bias is None else bias.contiguous()
    scales = None if scales is None else (scales[0].contiguous(), scales[1].contiguous())
    if _fits_hopper(x, y, steps, groups):
        _by_boxes(x, w, bias, scales, y, steps, activation)
    else:
        _by_pointers(x, w, bias, scales, y, steps, groups, activation)
    return y


def _fits_hopper(x: torch.Tensor, y: torch.Tensor, steps: Steps, groups: int) -> bool:
    """Whether TMA can read x and write y. The interpreter does not run Gluon."""
    if x.device.type not in ("cuda", "meta") or (x.device.type == "cuda" and not is_hopper(x.device)):
        return False
    aligned = x.shape[3] * x.element_size() % 128 == 0 and y.shape[3] % 8 == 0 and x.data_ptr() % 16 == 0
    return x.element_size() <= 2 and y.element_size() == 2 and aligned and steps.stride == (1, 1) and groups == 1


def _by_boxes(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales | None,
    y: torch.Tensor,
    steps: Steps,
    activation: str | None,
) -> None:
    (B, H, W, C), (_, P, Q, O), (R, S) = x.shape, y.shape, w.shape[1:3]
    N, sizes = 128 if O > 64 else 64, (B, P, Q)
    box = _box(sizes, triton.cdiv(O, N), num_sms(x.device), large=activation != "gelu")
    tiles = boxes(box, sizes) * triton.cdiv(O, N)
    x_scale, w_scale = scales or (y, y)  # not read
    launch = with_scratch_memory(hopper_kernel[(min(tiles, num_sms(x.device)),)])
    launch(
        x, w, y if bias is None else bias, x_scale, w_scale, y, B, H, W, C, O, P, Q, tiles, *steps.pad, *steps.dilation,
        R=R, S=S, B0=box[0], B1=box[1], B2=box[2], N=N, BC=128 // x.element_size(), SCALED=scales is not None,
        STAGES=3 if box[0] * box[1] * box[2] == 256 else 5, SUMS=tl.int32 if x.dtype == torch.int8 else tl.float32,
        BIASED=bias is not None, ACTIVATION=activation, num_warps=4,
    )  # fmt: skip


def _box(sizes: Box, deep: int, sms: int, *, large: bool) -> Box:
    """256 or 128 pixels, whichever leaves fewer multiprocessors idle in the last round of tiles. A large tile reads
    less, but has no registers left for the exact gelu."""
    found = [box_of(pixels, sizes) for pixels in ((256, 128) if large else (128,))]

    def busy(box: Box) -> float:
        tiles = boxes(box, sizes) * deep
        return tiles / (triton.cdiv(tiles, sms) * sms)

    return max(found, key=busy)  # the first of equal ones


def _by_pointers(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    scales: Scales | None,
    y: torch.Tensor,
    steps: Steps,
    groups: int,
    activation: str | None,
) -> None:
    (B, H, W, C), (_, P, Q, O), (R, S, I) = x.shape, y.shape, w.shape[1:]
    exact, small = x.element_size() > 2, 32 if x.dtype == torch.int8 else 16
    per_group = O // groups
    out = min(32 if exact else 64, max(16, next_power_of_2(per_group)))
    pixels, block = (32, 32) if exact else (64, 64)
    grid = (triton.cdiv(B * P * Q, pixels) * triton.cdiv(per_group, out), groups)
    pointer_kernel[grid](
        x, w, bias, *(scales or (None, None)), y, B, H, W, C, O, P, Q, I, *steps.stride, *steps.pad, *steps.dilation,
        groups, R=R, S=S, PIXELS=pixels, OUT=out, BC=min(block, max(small, next_power_of_2(I))),
        STAGES=1 if exact else 3, SUMS=tl.int32 if x.dtype == torch.int8 else triton_acc(x.dtype),
        ACC=triton_acc(y.dtype), ACTIVATION=activation, num_warps=4,
    )  # fmt: skip


def forward(a: Args) -> tuple[torch.Tensor]:
    steps = Steps(stride=(a.stride_h, a.stride_w), pad=(a.pad_h, a.pad_w), dilation=(a.dilation_h, a.dilation_w))
    return (convolve(a.x, a.w, a.bias, steps, a.groups, a.activation),)


def backward(a: Args, dy: torch.Tensor) -> Gradients:
    w = a.w
    steps = Steps(stride=(a.stride_h, a.stride_w), pad=(a.pad_h, a.pad_w), dilation=(a.dilation_h, a.dilation_w))
    dz = dy
    if a.activation is not None:  # the convolution is computed again instead of kept
        z = convolve(a.x, w, a.bias, steps, a.groups, None)
        wide = torch.promote_types(z.dtype, torch.float32)
        dz = activation_backward(dy.to(wide), z.to(wide), a.activation).to(dy.dtype)
    flipped = [d * (k - 1) - p for d, k, p in zip(steps.dilation, w.shape[1:3], steps.pad, strict=True)]
    by_kernel = steps.stride == (1, 1) and a.groups == 1 and min(flipped) >= 0
    dx, dw, dbias = gradients(dz, a.x, w, a.bias, steps.stride, steps.pad, steps.dilation, a.groups, data=not by_kernel)
    if by_kernel:
        whole = Steps(stride=(1, 1), pad=(flipped[0], flipped[1]), dilation=steps.dilation)
        dx = convolve(dz, w.flip(1, 2).permute(3, 1, 2, 0), None, whole, 1, None)
    return dx, dw, dbias
