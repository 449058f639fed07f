"""What conformance cannot say of swiglu, geglu, rope, transpose and the int8 pair: views, ties, tables, errors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bagu.errors import ArgumentError, UnknownName
from bagu.ops.dequantize_int8 import dequantize_int8
from bagu.ops.geglu import geglu
from bagu.ops.quantize_int8 import quantize_int8
from bagu.ops.rope import rope, rope_tables
from bagu.ops.swiglu import swiglu
from bagu.ops.transpose import transpose

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("torch", "triton")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE)


@pytest.mark.parametrize("op", [swiglu, geglu])
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_and_apart_agree(op: Callable[..., torch.Tensor], backend: str) -> None:
    """Forward and both gradients, gate and up being views of the packed tensor: a row stride of twice the row."""
    x = randn(3, 5, 2 * 37).requires_grad_()
    packed = op(x, backend=backend)
    separate = op(x[..., :37], x[..., 37:], backend=backend)
    assert torch.equal(packed, separate)
    dy = randn(3, 5, 37)
    (dx,), (views,) = torch.autograd.grad(packed, x, dy), torch.autograd.grad(separate, x, dy)
    assert torch.equal(dx, views)


def test_a_packed_x_of_odd_width_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"swiglu: x has shape \[2, 7\]"):
        swiglu(torch.ones(2, 7))
    assert swiglu(torch.ones(2, 7), torch.ones(2, 7)).shape == (2, 7)
    with pytest.raises(UnknownName) as error:
        geglu(torch.ones(2, 8), approximate="tan")
    assert "tanh" in error.value.hint


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_takes_queries_inside_qkv_and_transposed_heads(backend: str, layout: str) -> None:
    cos, sin = (t.to(DEVICE) for t in rope_tables(11, 4))
    qkv = randn(2, 7, 3 * 5, 12)
    swapped = randn(2, 5, 7, 12).transpose(1, 2)
    for view in (qkv[:, :, 5:10], swapped, swapped[:, 1:6]):
        want = rope(view.contiguous(), cos, sin, layout=layout, backend=backend)
        got = rope(view, cos, sin, layout=layout, backend=backend)
        assert torch.equal(got, want) and got.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rope_turns_by_relative_position(backend: str) -> None:
    """The product of a query at p and a key at p + k depends on k alone; the gradient turns back."""
    cos, sin = (t.to(DEVICE) for t in rope_tables(64, 16))
    q, k = randn(1, 1, 32).expand(40, 1, 32), (2 * randn(1, 1, 32)).expand(40, 1, 32)
    at = torch.arange(40, dtype=torch.int32, device=DEVICE)
    q, k = rope(q, cos, sin, at, backend=backend), rope(k, cos, sin, at + 9, backend=backend)
    products = (q * k).sum(-1)
    torch.testing.assert_close(products, products[:1].expand_as(products), rtol=1e-5, atol=1e-5)
    x = randn(5, 2, 32).requires_grad_()
    y = rope(x, cos, sin, backend=backend)
    (back,) = torch.autograd.grad(y, x, y.detach())
    torch.testing.assert_close(back, x.detach(), rtol=1e-5, atol=1e-5)


def test_rope_tables_are_right_at_far_positions() -> None:
    cos, sin = rope_tables(100_001, 3, base=500.0)
    for r in range(3):
        angle = 100_000 * 500.0 ** (-r / 3)
        assert abs(float(cos[-1, r]) - math.cos(angle)) < 1e-7 and abs(float(sin[-1, r]) - math.sin(angle)) < 1e-7


def test_rope_refuses_what_does_not_fit() -> None:
    x, (cos, sin) = torch.ones(4, 2, 8), rope_tables(3, 4)
    with pytest.raises(ArgumentError, match="x has 4 tokens, and the tables have 3 positions"):
        rope(x, cos, sin)
    with pytest.raises(ArgumentError, match="R = 4 pairs, and x has D = 6 features"):
        rope(x[..., :6], cos, sin)
    with pytest.raises(ArgumentError, match="no token dim"):
        rope(x[0], cos, sin)
    with pytest.raises(UnknownName) as error:
        rope(x, cos, sin, layout="halves")
    assert "half" in error.value.hint


@pytest.mark.parametrize("granularity", ["tensor", "row", "channel"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_even_and_the_round_trip_is_half_a_step(backend: str, granularity: str) -> None:
    x = torch.tensor([[-127.0, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 126.5]], device=DEVICE).mT.expand(8, 8).contiguous()
    x = x.mT if granularity == "row" else x  # every group holds all eight numbers, and its scale is 1
    q, scale = quantize_int8(x, granularity, backend=backend)
    want = torch.tensor([-127, -2, -2, 0, 0, 2, 2, 126], dtype=torch.int8, device=DEVICE)
    assert torch.equal(scale, torch.ones_like(scale))
    assert torch.equal(q, want.expand(8, 8) if granularity == "row" else want[:, None].expand(8, 8))
    x = randn(6, 100)
    q, scale = quantize_int8(x, granularity, backend=backend)
    y = dequantize_int8(q, scale, granularity, torch.float32, backend=backend)
    step = scale[:, None] if granularity == "row" else scale
    assert bool(((y - x).abs() <= 0.5001 * step).all())


def test_dequantize_refuses_a_scale_of_another_granularity() -> None:
    q, scale = quantize_int8(torch.ones(4, 6), "row")
    with pytest.raises(ArgumentError, match=r"scale has shape \[4\], expected \[6\] for q of shape \[4, 6\]"):
        dequantize_int8(q, scale, "channel")
    with pytest.raises(UnknownName):
        dequantize_int8(q, scale, "row", torch.int32)
    with pytest.raises(UnknownName) as error:
        quantize_int8(torch.ones(4, 6), "rows")
    assert "row" in error.value.hint


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_quantize(backend: str) -> None:
    for granularity, shape in (("tensor", (1,)), ("row", (0,)), ("channel", (6,))):
        q, scale = quantize_int8(torch.ones(0, 6, device=DEVICE), granularity, backend=backend)
        assert q.shape == (0, 6) and scale.shape == shape and not scale.any()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_transpose_carries_out_a_conjugation(backend: str, dtype: torch.dtype) -> None:
    """`x.conj()` only sets a bit, which a kernel that reads memory does not see."""
    x = torch.complex(randn(3, 5), randn(5, 3).T).to(dtype)
    assert x.conj().is_conj()
    want = torch.complex(x.real, -x.imag).T
    assert torch.equal(torch.view_as_real(transpose(x.conj(), 0, 1, backend=backend)), torch.view_as_real(want))
