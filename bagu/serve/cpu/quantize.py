"""Dynamic int8 on a CPU (W8A8): weights are rounded once with a scale per row, activations per call, a scale per token.

It is used for prompts, and for decodes that step.cpp does not support. The matmul is that of tile_product.h if it has
int8 dot products (`DotInt8`: ARM, x86 with VNNI), else torch's (`TorchInt8`).

A decode step reads every weight once, so a quarter of the bytes takes little more than a quarter of the time. All
linears and the head of the 135M shape for one row, two cores, each in its own process, several runs: 18-23 ms in fp32,
4.2-7.1 ms in int8; a whole step of 32 streams, alternating in one process: 142 and 63 ms. Weight-only int8
(`_weight_int8pack_mm`) is more accurate (0.8 % rms error against 1.1 %), but takes 1.5 times as long as
`linear_dynamic` for one row, and as long as fp32 for 32 rows; oneDNN takes 1.6 times as long.

Logits change, so greedy text may change too: parity with the trainer holds for fp32 and bf16.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import platform
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn

from bagu.errors import BackendError
from bagu.nn.change import with_modules
from bagu.nn.linear import Linear
from bagu.nn.model import Transformer
from bagu.serve.cpu.compiled import PackedLinear, has_int8_dot


def int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DotInt8 | TorchInt8:
    """y = x Wᵀ + b with W in int8, by the faster implementation on this CPU."""
    return DotInt8(weight, bias) if has_int8_dot() and weight.device.type == "cpu" else TorchInt8(weight, bias)


class DotInt8:
    """int8 linear with dot products in C++. 1536 x 576 on one Neoverse-N1 core, 32 rows: 100 GOP/s; fp32 reaches
    32 GFLOP/s, and torch's QNNPACK less."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.linear = PackedLinear(weight, bias, rounding="int8")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.linear(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], self.linear.N).to(x.dtype)


class TorchInt8:
    """int8 linear with torch's quantized linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.device.type != "cpu":
            raise BackendError(
                f"int8 runs on a CPU, and the weights are on {weight.device.type}",
                hint="serve with --device cpu, or without quantization",
            )
        w = weight.detach().float()
        scales = w.abs().amax(1).clamp_(min=1e-12).double() / 127
        zeros = torch.zeros(len(w), dtype=torch.int64)
        with warnings.catch_warnings():  # torch recommends torchao, which is not a dependency
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(w, scales, zeros, 0, torch.qint8)
            with _quantized_engine(engine()):
                self.weight = torch.ops.quantized.linear_prepack(rounded, None)
        self.bias = None if bias is None else bias.detach()
        self._product = _compiled()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias, saturates())


@functools.cache
def engine() -> str:
    """torch's engine for int8 products on this CPU: its default, or QNNPACK if the default works only on x86.

    torch for ARM has x86 as its default and raises when a weight is packed for it. oneDNN works everywhere, but without
    VNNI it is a reference loop, 60 times as slow as fp32.
    """
    for name in (torch.backends.quantized.engine, "qnnpack"):
        if name in torch.backends.quantized.supported_engines and _packs(name):
            return name
    raise BackendError(
        f"torch {torch.__version__} has no int8 matmul for this CPU ({platform.machine()})",
        hint="serve without quantization",
    )


def _packs(name: str) -> bool:
    with warnings.catch_warnings(), _quantized_engine(name):
        warnings.simplefilter("ignore")
        one = torch.quantize_per_channel(
            torch.ones(1, 1), torch.ones(1), torch.zeros(1, dtype=torch.int64), 0, torch.qint8
        )
        try:
            torch.ops.quantized.linear_prepack(one, None)
        except RuntimeError:
            return False
    return True


@functools.cache
def saturates() -> bool:
    """Whether the engine adds two products of 8 bits in 16, as on x86 without VNNI: 2 x 255 x 127 is more than 32,767.
    It then needs activations of 7 bits. For normal values the error is 1.3 % instead of 6.8 %, the time the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        packed = TorchInt8(torch.ones(1, 64)).weight
        return abs(float(torch.ops.quantized.linear_dynamic(torch.ones(1, 64), packed, False)) - 64) > 1


@contextlib.contextmanager
def _quantized_engine(name: str) -> Iterator[None]:
    """Set torch's engine, a global setting, and restore it. A packed weight keeps the engine it was packed for."""
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = name
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def _product(
    x: torch.Tensor,
    weight: torch.classes.quantized.LinearPackedParamsBase,  # type: ignore[name-defined]
    bias: torch.Tensor | None,
    saturates: bool,
) -> torch.Tensor:
    """x Wᵀ + bias. `linear_dynamic` has one scale for all of x. A token with large values, often the first one of a
    text, would leave few levels for the others, so rows are first scaled to a maximum of 1. QNNPACK raises for NaN, so
    NaN is replaced in x, and the scale of the row makes the result NaN."""
    wide = x.float()
    largest = wide.abs().amax(-1, True).clamp_(min=1e-30)
    y = torch.ops.quantized.linear_dynamic((wide / largest).nan_to_num_(), weight, saturates).mul_(largest)
    if bias is not None:
        y = y.add_(bias)
    return y.to(x.dtype)


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    """`_product` in TorchScript, to pass packed weights faster. From Python, torch looks up a class by name for each
    call of an op with a packed weight: 8 to 13 us of 18 to 28, and a step of 30 layers has 121 calls. A scripted
    function skips the lookup."""
    with warnings.catch_warnings():  # deprecated in favour of torch.compile, which needs a C++ compiler
        warnings.simplefilter("ignore", DeprecationWarning)
        function: Callable[..., torch.Tensor] = torch.jit.script(_product)
    return function


class Int8Linear(nn.Module):
    """Replaces a `Linear` of a model; the rest of the model is unchanged."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.int8 = int8(linear.merged(), linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.int8(x)


def merged(model: Transformer) -> Transformer:
    """The same model with one weight in each linear layer: weight normalisation, int8 scales and LoRA are merged."""
    return replace_linears(model, lambda linear: with_weight(linear, linear.merged()))


def with_weight(linear: Linear, weight: torch.Tensor) -> Linear:
    """A copy of a linear layer with another weight, and without weight normalisation, int8 scales and LoRA."""
    twin, nothing = copy.copy(linear), dict.fromkeys(("gain", "weight_scale", "lora_a", "lora_b"))
    twin._parameters = linear._parameters | {"weight": nn.Parameter(weight.detach(), False)} | nothing
    return twin


def replace_linears(model: Transformer, make: Callable[[Linear], nn.Module]) -> Transformer:
    """A copy of the model that shares all modules except the linear layers that `make` replaces."""
    return with_modules(model, lambda _, module: make(module) if isinstance(module, Linear) else None)
