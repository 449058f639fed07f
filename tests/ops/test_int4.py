"""Rounding of weights to 4 bits, and the checks of int4_matmul's arguments. Conformance tests the product."""

from __future__ import annotations

import pytest
import torch

from bagu.errors import ArgumentError
from bagu.ops import dequantize_int4, int4_matmul, quantize_int4
from bagu.ops.int4_matmul.layout import per_column, unpacked


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 0.02


def test_the_low_half_of_a_byte_is_the_even_column() -> None:
    packed, scales, _ = quantize_int4(torch.tensor([[-8.0, 7.0, 1.0, 0.0]]))
    assert packed.tolist() == [[0 | 15 << 4, 9 | 8 << 4]]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("symmetric", [True, False])
def test_an_error_is_at_most_half_a_step(weight: torch.Tensor, symmetric: bool) -> None:
    packed, scales, zeros = quantize_int4(weight, symmetric=symmetric)
    assert packed.shape == (6, 150) and scales.shape == (6, 3) and (zeros is None) == symmetric
    back = dequantize_int4(packed, scales, zeros)
    step = per_column(scales.abs(), 300)
    # the grid ends at 7 steps on one side: the value opposite to the largest one may be 8 steps away from 0
    clipped = symmetric & (unpacked(packed) == 15)
    assert ((back - weight).abs() <= (0.5 + 0.5 * clipped) * step * (1 + 1e-6)).all()
    levels = unpacked(packed)
    assert levels.min() == 0 and levels.max() == 15


def test_a_group_of_zeros_stays_zero(weight: torch.Tensor) -> None:
    weight[2, 128:256] = 0
    for symmetric in (True, False):
        back = dequantize_int4(*quantize_int4(weight, symmetric=symmetric))
        assert (back[2, 128:256] == 0).all() and (back[2, :128] != 0).any()


def test_a_quantized_weight_multiplies_as_its_dequantized_form(weight: torch.Tensor) -> None:
    x = torch.randn(3, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = quantize_int4(weight.double(), symmetric=False)
    torch.testing.assert_close(int4_matmul(x, *given), x @ dequantize_int4(*given, dtype=torch.float64).T)


def test_weights_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ArgumentError, match="even number of columns, not 5"):
        quantize_int4(torch.ones(2, 5))
    with pytest.raises(ArgumentError, match="not finite"):
        quantize_int4(torch.tensor([[1.0, float("nan")]]))


def test_shapes_that_do_not_fit_are_refused(weight: torch.Tensor) -> None:
    packed, scales, _ = quantize_int4(weight)
    with pytest.raises(ArgumentError, match="150 bytes a row, which is 300 values, and x has 256 columns"):
        int4_matmul(torch.ones(1, 256), packed, scales)
    with pytest.raises(ArgumentError, match="2 groups a row, expected 3"):
        int4_matmul(torch.ones(1, 300), packed, scales[:, :2])
