"""int8_matmul: exact sums, refusals, and training through int8_linear."""

from __future__ import annotations

import pytest
import torch

from bagu import ops
from bagu.errors import ArgumentError, BaguError
from bagu.ops.catalogue import spec
from bagu.ops.contract.core import Streams
from bagu.ops.replay.launcher import Launch, noted_launches
from tests.ops.points import DEVICE


def operands(M: int = 6, N: int = 5, K: int = 40) -> dict[str, torch.Tensor]:
    streams = Streams("int8_matmul")
    return {
        "x": streams.integers("x", -127, 128, M, K).to(torch.int8),
        "w": streams.integers("w", -127, 128, N, K).to(torch.int8),
        "x_scale": 0.01 + streams.uniform("x_scale", M).float(),
        "w_scale": 0.01 + streams.uniform("w_scale", N).float(),
    }


def test_a_sum_is_exact_beyond_the_integers_of_fp32() -> None:
    """32,769 is odd, so 127 * 127 * 32,769 is an odd number above 2^24."""
    x = torch.full((1, 32_769), 127, dtype=torch.int8)
    one = torch.ones(1, dtype=torch.float64)
    y = ops.int8_matmul(x, x, one, one, dtype=torch.float64)
    assert y.item() == 127 * 127 * 32_769


def test_straight_through_gradients_are_those_of_the_rounded_operands() -> None:
    streams = Streams("int8_linear")
    x, w, b = (streams.normal(n, *s).requires_grad_() for n, s in (("x", (2, 3, 40)), ("w", (5, 40)), ("b", (5,))))
    dy = streams.normal("dy", 2, 3, 5)
    y = ops.int8_linear(x, w, b)
    got = torch.autograd.grad(y, (x, w, b), dy)
    xr, wr = (ops.dequantize_int8(*ops.quantize_int8(v.detach()), dtype=torch.float64) for v in (x, w))
    xr, wr, br = (v.detach().requires_grad_() for v in (xr, wr, b))
    z = xr @ wr.T + br
    torch.testing.assert_close(y, z)
    for g, want in zip(got, torch.autograd.grad(z, (xr, wr, br), dy), strict=True):
        torch.testing.assert_close(g, want)
    assert not torch.equal(xr, x)  # rounding to int8 changes the values, so the comparison is not trivial


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches are noted in this thread, and a GPU's backward is not")
@pytest.mark.parametrize("backend, launches", [("torch", 0), ("triton", 2)])
def test_a_backward_dequantizes_by_the_backend_of_its_forward(backend: str, launches: int) -> None:
    x, w = torch.randn(3, 40, requires_grad=True), torch.randn(5, 40, requires_grad=True)
    with ops.use(backend):
        chosen = ops.int8_linear(x, w)
    for y in (chosen, ops.int8_linear(x, w, backend=backend)):
        seen: list[Launch] = []
        with noted_launches(seen.append):
            torch.autograd.grad(y.sum(), (x, w))
        assert len(seen) == launches


@pytest.mark.parametrize("backend", [None, "triton"])
def test_straight_through_compiles_as_one_graph_with_the_same_gradients(backend: str | None) -> None:
    x, w = (torch.randn(n, 32, device=DEVICE, requires_grad=True) for n in (4, 6))
    want = torch.autograd.grad(ops.int8_linear(x, w, backend=backend).square().sum(), (x, w))
    square = lambda a, b: ops.int8_linear(a, b, backend=backend).square().sum()  # noqa: E731
    fn = torch.compile(square, fullgraph=True, backend="aot_eager")
    for g, v in zip(torch.autograd.grad(fn(x, w), (x, w)), want, strict=True):
        torch.testing.assert_close(g, v)


def test_a_layer_learns_through_it() -> None:
    """Least squares by gradient descent: the loss falls far below that of the first weight."""
    torch.manual_seed(0)
    x, target = torch.randn(64, 16), torch.randn(8, 16)
    w = torch.zeros(8, 16, requires_grad=True)
    losses = []
    for _ in range(60):
        loss = (ops.int8_linear(x, w) - x @ target.T).square().mean()
        (grad,) = torch.autograd.grad(loss, w)
        losses.append(loss.item())
        w = (w - 2.0 * grad).detach().requires_grad_()
    assert losses[-1] < losses[0] / 100


@pytest.mark.parametrize(
    "change, said",
    [
        ({"x_scale": torch.ones(5)}, "x_scale"),
        ({"w_scale": torch.ones(6)}, "w_scale"),
        ({"w_scale": torch.ones(5, 1)}, "w_scale"),
        ({"w": torch.zeros(5, 41, dtype=torch.int8)}, "K = 40"),
        ({"x": torch.zeros(6, 40)}, "int8"),
        ({"activation": "tanh"}, "activation"),
        ({"dtype": torch.int32}, "dtype"),
    ],
)
def test_a_wrong_argument_is_named(change: dict[str, object], said: str) -> None:
    with pytest.raises(BaguError, match=said):
        ops.int8_matmul(**operands() | change)  # type: ignore[arg-type]


def test_a_sum_that_could_overflow_is_refused() -> None:
    x = torch.zeros(1, 1 << 17, dtype=torch.int8)
    with pytest.raises(ArgumentError, match="overflow"):
        ops.int8_matmul(x, x, torch.ones(1), torch.ones(1))


@pytest.mark.parametrize("bad, said", [(float("nan"), "NaN"), (-1.0, "negative"), (0.0, "not all zeros")])
@pytest.mark.parametrize("which", ["x_scale", "w_scale"])
def test_bad_scales_are_named_in_debug_mode(which: str, bad: float, said: str) -> None:
    """The check reads the values and so stops the device; an ordinary call does not make it."""
    args = operands()
    args[which][2] = bad
    found = spec("int8_matmul")
    given = args | {"bias": None, "activation": None, "dtype": "float32"}
    assert found.check_values is not None
    with pytest.raises(ArgumentError, match=said) as error:
        found.check_values(given, found.bind(given))
    assert which in str(error.value)


def test_the_scale_of_a_row_of_zeros_is_accepted_in_debug_mode() -> None:
    args = operands()
    args["x"][2] = 0
    args["x_scale"][2] = 0
    given = args | {"bias": None, "activation": None, "dtype": "float32"}
    found = spec("int8_matmul")
    assert found.check_values is not None
    found.check_values(given, found.bind(given))
    assert (ops.int8_matmul(**args)[2] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("M, N, K", [(4096, 4096, 4096), (1000, 3000, 1040), (333, 111, 77), (16, 6144, 4096)])
def test_sizes_of_every_tile_on_a_gpu(M: int, N: int, K: int) -> None:
    """Exact: every sum is an integer below 2^24 for values of at most 11, and the scales are powers of two."""
    streams = Streams("int8_matmul", M, device="cuda")
    x = streams.integers("x", -11, 12, M, K).to(torch.int8)
    w = streams.integers("w", -11, 12, N, K).to(torch.int8)
    x_scale = 2.0 ** streams.integers("x_scale", -3, 4, M)
    w_scale = 2.0 ** streams.integers("w_scale", -3, 4, N)
    y = ops.int8_matmul(x, w, x_scale, w_scale, dtype=torch.float32, backend="triton")
    want = (x.double() @ w.double().T) * x_scale.double()[:, None] * w_scale.double()
    assert torch.equal(y.double(), want)
    short = ops.int8_matmul(x, w, x_scale, w_scale, dtype=torch.bfloat16, backend="triton")
    assert torch.equal(short, want.bfloat16())
