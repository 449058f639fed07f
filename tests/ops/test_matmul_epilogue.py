"""matmul and fp8_matmul: which backend runs a call, refusals, training through the epilogue, every tile on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bagu import ops
from bagu.errors import ArgumentError, BaguError
from bagu.ops.activations import ACTIVATIONS, activate, activation_backward
from bagu.ops.call.dispatch import automatic_backend
from bagu.ops.catalogue import spec
from bagu.ops.contract.core import Streams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = {"matmul": ("row_scale", "column_scale"), "fp8_matmul": ("x_scale", "w_scale")}


def operands(op: str, M: int = 6, N: int = 8, K: int = 32) -> dict[str, torch.Tensor]:
    """Tensors of a call with both scales."""
    streams, (rows, columns) = Streams("epilogue", device=DEVICE), SCALES[op]
    dtype = torch.float8_e4m3fn if op == "fp8_matmul" else torch.float32
    found = {"x": streams.normal("x", M, K).to(dtype), "w": streams.normal("w", N, K).to(dtype)}
    scales = {
        rows: 0.5 + streams.uniform("row_scale", M).float(),
        columns: 0.5 + streams.uniform("column_scale", N).float(),
    }
    return found | scales


def test_activations_are_those_of_torch() -> None:
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64, requires_grad=True)
    theirs = {
        "gelu": F.gelu(z), "gelu_tanh": F.gelu(z, approximate="tanh"), "silu": F.silu(z), "relu": F.relu(z),
    }  # fmt: skip
    dy = torch.linspace(-1, 2, 4001, dtype=torch.float64)
    assert set(theirs) == set(ACTIVATIONS)
    for name, want in theirs.items():
        torch.testing.assert_close(activate(z, name), want)
        (dz,) = torch.autograd.grad(activate(z, name), z, dy)
        torch.testing.assert_close(activation_backward(dy, z.detach(), name), dz)


@pytest.mark.parametrize("op", SCALES)
@pytest.mark.parametrize("shape", [(5,), (8,), (6, 1), ()])
def test_a_row_scale_of_another_shape_is_named(op: str, shape: tuple[int, ...]) -> None:
    name = SCALES[op][0]
    with pytest.raises(ArgumentError, match=f"{name} has shape"):
        getattr(ops, op)(**operands(op) | {name: torch.ones(shape, device=DEVICE)})


@pytest.mark.parametrize("op", SCALES)
@pytest.mark.parametrize(
    "change, said",
    [
        ({"bias": torch.ones(6, device=DEVICE)}, "bias has shape"),
        ({"residual": torch.ones(8, 6, device=DEVICE)}, "residual has shape"),
        ({"activation": "tanh"}, "activation"),
        ({"w": torch.ones(8, 32, dtype=torch.float16, device=DEVICE)}, "w has dtype"),
    ],
)
def test_a_wrong_argument_is_named(op: str, change: dict[str, object], said: str) -> None:
    with pytest.raises(BaguError, match=said):
        getattr(ops, op)(**operands(op) | change)


@pytest.mark.parametrize("op, which", [(op, name) for op, names in SCALES.items() for name in names])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_bad_scales_are_named_in_debug_mode(op: str, which: str, bad: float) -> None:
    """The check reads the values and so stops the device; an ordinary call does not make it."""
    found, args = spec(op), dict(operands(op))
    given = dict.fromkeys(found.names) | args | ({"dtype": "bfloat16"} if op == "fp8_matmul" else {})
    assert found.check_values is not None
    found.check_values(given, found.bind(given))
    args[which][2] = bad
    with pytest.raises(ArgumentError, match=which):
        found.check_values(given, found.bind(given))


def test_fp8_operands_of_matmul_are_multiplied_by_fp8_matmul() -> None:
    args = operands("fp8_matmul")
    x, w, x_scale, w_scale = args.values()
    want = ops.fp8_matmul(x, w, x_scale, w_scale, activation="gelu")
    got = ops.matmul(x, w, activation="gelu", row_scale=x_scale, column_scale=w_scale)
    assert got.dtype == torch.bfloat16 and torch.equal(got, want)
    with pytest.raises(ArgumentError, match="column_scale is None"):
        ops.matmul(x, w, row_scale=x_scale)


@pytest.mark.parametrize(
    "dtype, change, backend",
    [
        (torch.bfloat16, {"activation": "gelu"}, "triton"),
        (torch.float16, {"row_scale": torch.ones(128)}, "triton"),
        (torch.bfloat16, {}, "torch"),
        (torch.bfloat16, {"bias": torch.ones(64)}, "torch"),
        (torch.bfloat16, {"residual": torch.ones(128, 64)}, "torch"),
        (torch.float32, {"activation": "gelu"}, "torch"),
        (torch.bfloat16, {"activation": "gelu", "w": torch.ones(60, 32).bfloat16()}, "torch"),
        (torch.bfloat16, {"activation": "gelu", "w": torch.ones(64, 32).bfloat16().requires_grad_()}, "torch"),
    ],
)
def test_the_automatic_choice_on_a_gpu(dtype: torch.dtype, change: dict[str, object], backend: str) -> None:
    found = spec("matmul")
    args = dict.fromkeys(found.names) | {"x": torch.ones(128, 32, dtype=dtype), "w": torch.ones(64, 32, dtype=dtype)}
    assert automatic_backend(found, args | change) == backend


def test_a_layer_learns_through_the_epilogue() -> None:
    """Gradient descent on the weight, the bias and both scales of a gelu layer: the loss falls far below the first."""
    streams = Streams("learn", device=DEVICE)
    x, target = streams.normal("x", 64, 16), streams.normal("target", 64, 8)
    sizes = {"w": (8, 16), "bias": (8,), "column_scale": (8,), "row_scale": (64,)}
    found = {name: (0.3 * streams.normal(name, *size) + 1).requires_grad_() for name, size in sizes.items()}
    losses = []
    for _ in range(80):
        w, bias, column_scale, row_scale = found.values()
        y = ops.matmul(
            x, w, bias, residual=target.flip(0), row_scale=row_scale, column_scale=column_scale, activation="gelu"
        )  # fmt: skip
        loss = (y - target).square().mean()
        losses.append(loss.item())
        grads = torch.autograd.grad(loss, list(found.values()))
        found = {
            n: (v - 0.3 * g).detach().requires_grad_() for (n, v), g in zip(found.items(), grads, strict=True)
        }  # fmt: skip
    assert losses[-1] < losses[0] / 2


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [0, 1])
@pytest.mark.parametrize("M, N, K", [(4096, 4096, 512), (1000, 3008, 1040), (300, 520, 72)])
def test_every_persistent_tile_is_exact_on_a_gpu(tile: int, M: int, N: int, K: int) -> None:
    """Sums of small integers are exact in fp32, and the scales are powers of two: the only rounding is the last."""
    from bagu.ops.matmul import triton_backend
    from bagu.ops.matmul.spec import Args

    streams = Streams("matmul", M, device="cuda")
    number = lambda name, *size: streams.integers(name, -5, 6, *size).bfloat16()  # noqa: E731
    x, w, bias, residual = number("x", M, K), number("w", N, K), number("bias", N), number("residual", M, N)
    row_scale, column_scale = (2.0 ** streams.integers(n, -2, 3, size) for n, size in (("row", M), ("column", N)))
    want = (x.double() @ w.double().T) * row_scale.double()[:, None] * column_scale.double() + bias.double()
    (y,) = triton_backend.forward(Args(x, w, bias, residual, row_scale, column_scale, "relu"), tile=tile)
    assert torch.equal(y, (want.relu() + residual.double()).bfloat16())
    (y,) = triton_backend.forward(Args(x, w, None, None, None, None, None), tile=tile)
    assert torch.equal(y, (x.double() @ w.double().T).bfloat16())
