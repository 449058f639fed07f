"""conv2d: the public function against torch, memory formats, tiles, refusals, and the Hopper kernel on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from bagu import ops
from bagu.errors import ArgumentError, BaguError
from bagu.ops.activations import activate
from bagu.ops.contract.core import Streams
from bagu.ops.conv2d.tiles import box_of, boxes
from tests.ops.points import DEVICE


def operands(
    *image: int, kernel: tuple[int, ...], device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    streams = Streams("conv2d", image, device=device)
    return streams.normal("x", *image), streams.normal("w", *kernel), streams.normal("bias", kernel[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": (2, 1), "padding": (1, 2)},
        {"padding": "same", "dilation": 2},
        {"padding": "valid"},
        {"groups": 2, "padding": 1},
    ],
    ids=str,
)
def test_arguments_mean_what_they_mean_in_torch(options: dict[str, Any]) -> None:
    x, w, b = operands(2, 4, 9, 8, kernel=(6, 4 // options.get("groups", 1), 3, 3))
    torch.testing.assert_close(ops.conv2d(x, w, b, **options), F.conv2d(x, w, b, **options))


def test_conv1d_is_a_convolution_of_one_row() -> None:
    x, w, b = operands(2, 4, 11, kernel=(6, 2, 3))
    got = ops.conv1d(x, w, b, stride=2, padding=2, dilation=2, groups=2, activation="relu")
    torch.testing.assert_close(got, F.conv1d(x, w, b, stride=2, padding=2, dilation=2, groups=2).relu())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_result_has_the_memory_format_of_the_image(backend: str, memory_format: torch.memory_format) -> None:
    x, w, b = operands(2, 8, 5, 6, kernel=(8, 8, 3, 3), device=DEVICE)
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    y = ops.conv2d(x, w, b, padding=1, backend=backend)
    single = ops.conv2d(x.float(), w.float(), b.float(), padding=1, backend=backend)  # in fp64 cuDNN has one format
    assert single.is_contiguous(memory_format=memory_format)
    want = F.conv2d(x, w, b, padding=1)
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(*(torch.autograd.grad(v.square().sum(), x)[0] for v in (y, want)))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"groups": 3}, "groups is 3"),
        ({"groups": 0}, "groups is 0"),
        ({"groups": 2}, "w has 4 input channels"),
        ({"stride": 0}, "stride is 0"),
        ({"dilation": (1, 0)}, "dilation 0"),
        ({"padding": -1}, "padding -1"),
        ({"dilation": 4}, "covers 9 pixels, the padded image has 5"),
        ({"padding": "same", "stride": 2}, "same"),
        ({"padding": "full"}, "full"),
        ({"stride": (1, 1, 1)}, "pair"),
        ({"activation": "tanh"}, "activation"),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named(options: dict[str, Any], said: str) -> None:
    x, w, b = operands(2, 4, 5, 5, kernel=(6, 4, 3, 3))
    with pytest.raises(BaguError, match=said):
        ops.conv2d(x, w, b, **options)


def test_the_number_of_dims_is_named() -> None:
    with pytest.raises(ArgumentError, match="3 dims, expected 4"):
        ops.conv2d(torch.zeros(4, 5, 5), torch.zeros(6, 4, 3, 3))
    with pytest.raises(ArgumentError, match="3 dims"):
        ops.conv1d(torch.zeros(4, 5), torch.zeros(6, 4, 3))


@pytest.mark.parametrize(
    "sizes, pixels, box",
    [
        ((32, 56, 56), 256, (4, 8, 8)),
        ((32, 28, 28), 128, (8, 4, 4)),
        ((32, 14, 14), 128, (32, 2, 2)),
        ((1, 1, 100), 128, (1, 1, 128)),
    ],
)
def test_a_box_leaves_few_pixels_over(sizes: tuple[int, int, int], pixels: int, box: tuple[int, int, int]) -> None:
    assert box_of(pixels, sizes) == box
    assert boxes(box, sizes) * pixels < 1.3 * sizes[0] * sizes[1] * sizes[2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "gelu", "silu", "relu"])
@pytest.mark.parametrize(
    "image, out, options",
    [
        ((32, 128, 56, 56), 128, {"padding": 1}),
        ((32, 256, 28, 28), 256, {"padding": 1}),
        ((32, 512, 14, 14), 512, {"padding": 1}),
        ((3, 64, 17, 23), 72, {"padding": (2, 0), "dilation": (2, 1)}),  # no side is a multiple of a box
        ((2, 128, 16, 16), 40, {}),  # boxes of two images: each half has one
        ((1, 64, 16, 16), 64, {"padding": 1}),  # one image: the halves are rows
    ],
    ids=str,
)
def test_hopper_kernel_against_fp64(
    image: tuple[int, ...], out: int, options: dict[str, Any], activation: str | None, dtype: torch.dtype
) -> None:
    x, w, b = operands(*image, kernel=(out, image[1], 3, 3), device="cuda")
    x = x.to(dtype).contiguous(memory_format=torch.channels_last)
    w, b = (w / (9 * image[1]) ** 0.5).to(dtype), b.to(dtype)
    y = ops.conv2d(x, w, b, **options, activation=activation, backend="triton").double()
    z = F.conv2d(x.double(), w.double(), b.double(), **options)
    want = activate(z, activation)
    eps = torch.finfo(dtype).eps
    assert bool(((y - want).abs() <= eps * (want.abs() + want.square().mean().sqrt())).all())
