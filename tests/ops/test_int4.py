"""Rounding of weights to 4 bits, and the checks of int4_matmul's arguments. Conformance tests the product."""

from __future__ import annotations

import pytest
import torch

from bagu.errors import ArgumentError
from bagu.ops import dequantize_int4, int4_matmul, quantize_int4
from bagu.ops.catalogue import spec
from bagu.ops.contract.core import Streams
from bagu.ops.int4_matmul.layout import pack_int4, per_column, unpacked
from tests.ops.points import DEVICE


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(6, 300, generator=torch.Generator().manual_seed(0)) * 0.02


def test_a_byte_has_a_column_of_each_half_of_its_group() -> None:
    packed, scales, _ = quantize_int4(torch.tensor([[-8.0, 7.0, 1.0, 0.0]]))
    assert packed.tolist() == [[0 | 9 << 4, 15 | 8 << 4]]
    assert scales.tolist() == [[1.0]]


@pytest.mark.parametrize("K", [2, 128, 130, 300])
def test_columns_keep_their_order(K: int) -> None:
    values = torch.randint(0, 16, (3, K), generator=torch.Generator().manual_seed(K), dtype=torch.uint8)
    packed = pack_int4(values)
    assert packed.shape == (3, K // 2) and torch.equal(unpacked(packed), values)
    if K > 128:
        assert torch.equal(packed[:, :64], values[:, :64] | values[:, 64:128] << 4)


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


def test_scales_of_another_shape_are_refused(weight: torch.Tensor) -> None:
    packed, scales, _ = quantize_int4(weight)
    x = torch.ones(1, 300)
    for wrong in (scales[:5], scales[0], scales.unsqueeze(2)):
        with pytest.raises(ArgumentError, match="scales"):
            int4_matmul(x, packed, wrong)
    with pytest.raises(ArgumentError, match="zeros"):
        int4_matmul(x, packed, scales, scales[:, :2])


def check_values(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
    args = {"x": torch.ones(1, 2 * packed.shape[1]), "packed": packed, "scales": scales, "zeros": zeros, "bias": None}
    found = spec("int4_matmul")
    assert found.check_values is not None
    found.check_values(args, found.bind(args))


@pytest.mark.parametrize("bad, said", [(float("nan"), "NaN"), (float("inf"), "infinite"), (0.0, "scales is 0")])
def test_bad_scales_are_named_in_debug_mode(weight: torch.Tensor, bad: float, said: str) -> None:
    """The check reads the values and so stops the device; an ordinary call does not make it."""
    packed, scales, zeros = quantize_int4(weight, symmetric=False)
    check_values(packed, scales, zeros)
    scales[2, 1] = bad
    with pytest.raises(ArgumentError, match=said):
        check_values(packed, scales, zeros)


def test_fractional_zero_points_are_named_in_debug_mode(weight: torch.Tensor) -> None:
    packed, scales, zeros = quantize_int4(weight, symmetric=False)
    assert zeros is not None
    zeros[0, 0] += 0.5
    with pytest.raises(ArgumentError, match="whole numbers"):
        check_values(packed, scales, zeros)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_group_of_zeros_passes_the_check(weight: torch.Tensor, symmetric: bool) -> None:
    weight[2, 128:256] = 0
    check_values(*quantize_int4(weight, symmetric=symmetric))


def test_rows_of_an_odd_stride_are_read_right(weight: torch.Tensor) -> None:
    """Every second row of these begins at an address that is not a multiple of 4."""
    given = quantize_int4(weight[:, :130].to(DEVICE))
    wide = torch.randn(3, 131, generator=torch.Generator().manual_seed(1)).half().to(DEVICE)
    x = wide[:, :130]
    assert torch.equal(int4_matmul(x, *given, backend="triton"), int4_matmul(x.contiguous(), *given, backend="triton"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "M, N, K", [(1, 4096, 4096), (16, 14336, 4096), (16, 4096, 14336), (33, 1000, 4096), (300, 515, 1270)]
)
def test_sizes_of_every_tile_on_a_gpu(M: int, N: int, K: int, dtype: torch.dtype) -> None:
    """Exact: x and the values are small integers and the scales powers of two, so every sum is an integer in fp32 and
    the only rounding is that of the result."""
    streams = Streams("int4_matmul", M, device="cuda")
    x = streams.integers("x", -3, 4, M, K).to(dtype)
    packed = streams.integers("packed", 0, 256, N, K // 2).to(torch.uint8)
    scales = 2.0 ** streams.integers("scales", 0, 3, N, -(-K // 128)).float() / 4
    zeros = streams.integers("zeros", 0, 16, N, -(-K // 128)).float()
    for z in (None, zeros):
        want = x.double() @ dequantize_int4(packed, scales, z, torch.float64).T
        got = int4_matmul(x, packed, scales, z, backend="triton")
        assert torch.equal(got, want.to(dtype))


@pytest.mark.gpu
def test_a_result_has_the_same_bits_in_every_run() -> None:
    """K is divided among programs, and the parts are added in their order."""
    streams = Streams("int4_matmul", device="cuda")
    x, w = streams.normal("x", 16, 8192).bfloat16(), streams.normal("w", 1024, 8192)
    weight = quantize_int4(w.float())
    first = int4_matmul(x, *weight)
    assert all(torch.equal(int4_matmul(x, *weight), first) for _ in range(20))
