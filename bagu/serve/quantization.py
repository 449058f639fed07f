"""Quantized linear layers for serving: `--quantization int8 | int4 | fp8`.

            weights                               CPU                       GPU
    int8    a scale per row                       cpu/quantize.py           many rows: int8 activations
    int4    groups of 128 inputs (int4_matmul)    int8 activations, C++     int4_matmul
    fp8     e4m3, a scale per row                 in the model's dtype      many rows: fp8 activations

With few rows, as in decoding, reading the weight takes most of the time, and rounding activations would only be one
more launch: there int8 and fp8 on a GPU are w8a16_matmul. On a CPU the head is int8 with int8 and int4, and in the
model's dtype with fp8. On a GPU it keeps the model's dtype. No CPU has fp8 products, so fp8 there has the values of a
GPU's weights, and neither their size nor their speed. Routers keep their dtype, because a rounded score may select
another expert. Experts keep theirs too: they are not `Linear`. So does MLA's `kv_b`: with a KV cache it is never a
linear layer, but is multiplied into queries and values.
"""

import torch
from torch import nn

from bagu import ops
from bagu.errors import BackendError
from bagu.nn.linear import Linear
from bagu.nn.mla import MLA
from bagu.nn.model import Transformer
from bagu.nn.moe import Router
from bagu.serve.config import Quantization
from bagu.serve.cpu.compiled import PackedLinear, compiles
from bagu.serve.cpu.quantize import Int8Linear, replace_linears, with_weight

# Up to here reading the weight takes most of the time: activations are not rounded. us on an H200 with / without
# rounding to int8 at 32 rows: 10.0 / 6.1 (4096 x 1024), 26.2 / 17.6 (6144 x 4096); at 64: 9.9 / 10.0 and 23.2 / 37.6.
FEW_ROWS = 32


def quantized(model: Transformer, kind: Quantization) -> Transformer:
    """The same model with quantized linear layers; everything else is shared."""
    on_cpu = model.embedding.weight.device.type == "cpu"
    make = {
        "int8": Int8Linear if on_cpu else W8A8Linear,
        "int4": Int4Linear,
        "fp8": _rounded_to_fp8 if on_cpu else Fp8Linear,
    }[kind]
    kept = {id(m.kv_b) for m in model.modules() if isinstance(m, MLA)}
    return replace_linears(
        model, lambda linear: linear if isinstance(linear, Router) or id(linear) in kept else make(linear)
    )


class W8A8Linear(nn.Module):
    """Replaces a `Linear` on a GPU: activations of many rows are rounded to int8 with a scale per token."""

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        for name, tensor in zip(("values", "scales"), ops.quantize_int8(linear.merged().detach()), strict=True):
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[:-1].numel() <= FEW_ROWS:
            return ops.w8a16_matmul(x, self.values, self.scales, self.bias)
        values, scales = ops.quantize_int8(x)
        return ops.int8_matmul(values, self.values, scales, self.scales, self.bias, dtype=x.dtype)


class Int4Linear(nn.Module):
    """Replaces a `Linear` of a model by a product with a 4-bit weight."""

    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear: PackedLinear | None = None
        weight = linear.merged().detach()
        if weight.device.type == "cpu" and compiles(linear.dtype):
            self.linear = PackedLinear(weight, linear.bias, rounding="int4")
        else:
            for name, tensor in ops.quantize_int4(weight)._asdict().items():
                self.register_buffer(name, tensor)  # graphs.py finds quantized weights among the buffers
            self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.linear is None:
            return ops.int4_matmul(x, self.packed, self.scales, self.zeros, self.bias)
        y, _ = self.linear(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], self.linear.N).to(x.dtype)


def _rounded_to_fp8(linear: Linear) -> Linear:
    """The layer with the values of an fp8 weight, in its own dtype."""
    weight = linear.merged()
    values, scales = ops.quantize_fp8(weight)
    return with_weight(linear, (values.float() * scales.unsqueeze(1)).to(weight.dtype))


class Fp8Linear(nn.Module):
    """Replaces a `Linear` on a GPU with fp8 units: activations of many rows are rounded to fp8 with a scale per
    token."""

    values: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        weight = linear.merged().detach()
        if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < (8, 9):
            raise BackendError(
                f"fp8 needs a GPU of compute capability 8.9 or later; the weights are on {weight.device}",
                hint="use quantization int4, or none",
            )
        self.bias = linear.bias
        for name, tensor in zip(("values", "scales"), ops.quantize_fp8(weight), strict=True):
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[:-1].numel() <= FEW_ROWS:
            return ops.w8a16_matmul(x, self.values, self.scales, self.bias)
        values, scales = ops.quantize_fp8(x.reshape(-1, x.shape[-1]))
        y = torch._scaled_mm(
            values, self.values.T, scales.unsqueeze(1), self.scales.view(1, -1), self.bias, out_dtype=torch.bfloat16
        )
        return y.view(*x.shape[:-1], -1).to(x.dtype)
