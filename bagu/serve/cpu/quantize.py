"""Dynamic int8 on a CPU (W8A8): weights are rounded once, a scale a row; activations at each call, a scale a token.

For prompts, and for decodes that step.cpp does not compute. The product is that of packed_linear.h where it has dot
products of int8 (`DotInt8`: ARM), else torch's (`TorchInt8`).

A decode step reads every weight once, so a quarter of the bytes is most of a quarter of the time. All linears and the
head of the 135M shape for one row, two cores, each alone in its process, several runs: 18-23 ms in fp32, 4.2-7.1 ms
here; a whole step of 32 streams, in turns in one process: 142 and 63 ms. Weight-only int8 (`_weight_int8pack_mm`) is
nearer to the exact product (0.8 % rms against 1.1 %), but takes 1.5 of the time of `linear_dynamic` for one row, and
that of fp32 for 32; oneDNN takes 1.6.

Logits change, so greedy text may: parity with the trainer is for fp32 and bf16.
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
from bagu.nn.linear import Linear
from bagu.nn.model import Transformer
from bagu.nn.moe import Router
from bagu.serve.cpu.compiled import PackedLinear, has_int8_dot

__all__ = ["DotInt8", "TorchInt8", "int8", "quantized"]


def int8(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DotInt8 | TorchInt8:
    """y = x Wᵀ + b with W in int8, by the faster of the two."""
    return DotInt8(weight, bias) if has_int8_dot() and weight.device.type == "cpu" else TorchInt8(weight, bias)


class DotInt8:
    """By dot products in C++. 1536 x 576 on one Neoverse-N1 core, 32 rows: 100 GOP/s, where fp32 has 32 GFLOP/s and
    torch's QNNPACK less."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.linear = PackedLinear(weight, bias, int8=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.linear(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], self.linear.N).to(x.dtype)


class TorchInt8:
    """By torch's quantized linear."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.device.type != "cpu":
            raise BackendError(
                f"int8 runs on a CPU, and the weights are on {weight.device.type}",
                hint="serve with --device cpu, or without quantization",
            )
        w = weight.detach().float()
        scales = w.abs().amax(1).clamp_(min=1e-12).double() / 127
        zeros = torch.zeros(len(w), dtype=torch.int64)
        with warnings.catch_warnings():  # torch points to torchao, which is not a dependency
            warnings.simplefilter("ignore")
            rounded = torch.quantize_per_channel(w, scales, zeros, 0, torch.qint8)
            with _quantized_engine(engine()):
                self.weight = torch.ops.quantized.linear_prepack(rounded, None)
        self.bias = None if bias is None else bias.detach()
        self._product = _compiled()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias)


@functools.cache
def engine() -> str:
    """torch's engine for int8 products on this CPU: its default, or QNNPACK where that one is for x86 only.

    torch for ARM names x86 as its default and raises when a weight is packed for it. oneDNN's works everywhere, but
    without VNNI it is a reference loop, 60 times as slow as fp32.
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


@contextlib.contextmanager
def _quantized_engine(name: str) -> Iterator[None]:
    """A packed weight keeps the engine it was packed for; the setting is the process's, and is restored."""
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
) -> torch.Tensor:
    """x Wᵀ + bias. `linear_dynamic` has one scale for all of x, and a token of large values, as the first one of a
    text often is, would leave the others a few levels: rows are scaled to a largest value of 1 first. QNNPACK raises
    for a NaN: it is replaced there, and the row becomes NaN by its scale."""
    wide = x.float()
    largest = wide.abs().amax(-1, True).clamp_(min=1e-30)
    y = torch.ops.quantized.linear_dynamic((wide / largest).nan_to_num_(), weight, False).mul_(largest)
    if bias is not None:
        y = y.add_(bias)
    return y.to(x.dtype)


@functools.cache
def _compiled() -> Callable[..., torch.Tensor]:
    """`_product` in TorchScript, for the way a packed weight comes in: from Python torch looks up a class by its name
    for each call of an op that takes one, 8 to 13 us of 18 to 28, and there are 121 calls in a step of 30 layers. A
    scripted function takes it as it is."""
    with warnings.catch_warnings():  # deprecated for torch.compile, which needs a C++ compiler
        warnings.simplefilter("ignore", DeprecationWarning)
        function: Callable[..., torch.Tensor] = torch.jit.script(_product)
    return function


class Int8Linear(nn.Module):
    """In the place of a `Linear` of a model that is not changed otherwise."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.int8 = int8(linear.merged(), linear.bias)
        self.merged = linear.merged  # MLA folds a weight into its neighbours

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.int8(x)


def quantized(model: Transformer) -> Transformer:
    """The same model with int8 in its linear layers; everything else is shared. Routers keep their dtype: a rounded
    score is another choice of expert. Experts do too: they are not `Linear`."""
    return replace_linears(model, lambda linear: linear if isinstance(linear, Router) else Int8Linear(linear))


def merged(model: Transformer) -> Transformer:
    """The same model with one weight in each linear layer: weight normalisation and LoRA multiplied out."""

    def merge(linear: Linear) -> Linear:
        twin, nothing = copy.copy(linear), dict.fromkeys(("gain", "lora_a", "lora_b"))
        twin._parameters = linear._parameters | {"weight": nn.Parameter(linear.merged().detach(), False)} | nothing
        return twin

    return replace_linears(model, merge)


def replace_linears(model: Transformer, make: Callable[[Linear], nn.Module]) -> Transformer:
    """A copy of the model that shares all of its modules but the linear layers that `make` replaces."""

    def copied(module: nn.Module) -> nn.Module:
        if isinstance(module, Linear):
            return make(module)
        twin = copy.copy(module)
        twin._modules = {name: None if m is None else copied(m) for name, m in module._modules.items()}
        return twin

    return copied(model)  # type: ignore[return-value]
