"""Linear layers that are trained in fp8: the operands of their three products are rounded to 8 bits.

    y = x Wᵀ        dx = dy W        dW = dyᵀ x

Each operand has one scale, computed from its own largest number (ops.quantize_fp8_matrix), and sums are in fp32. A
weight is rounded once a step, by `Fp8Weights.round`; x once in the forward, which keeps only the 8 bits that dW needs;
dy once in the backward. Weights, gradients and the rest of the model keep their dtype. In evaluation mode a layer
computes with its weight itself, the one that is saved and served.

On a GPU the products run in cuBLAS. Elsewhere the rounded numbers are multiplied in fp32, which is the same arithmetic.
Papers: https://arxiv.org/abs/2209.05433, https://arxiv.org/abs/2310.18313 (FP8-LM)
"""

from typing import Any, Literal, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bagu import ops
from bagu.ops.contract.signature import accumulator

MULTIPLE = 16  # cuBLAS reads rows of fp8 in units of 16 bytes: the summed dim of a product is a multiple of it
GRADIENT: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn"  # of dy


class Rounded(NamedTuple):
    """A matrix in fp8: x ≈ q * scale, and t is the transpose of q."""

    q: torch.Tensor
    t: torch.Tensor
    scale: torch.Tensor


def rounded(x: torch.Tensor, dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn") -> Rounded:
    return Rounded(*ops.quantize_fp8_matrix(x, dtype=dtype))


def product(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """a[M, K] bᵀ[K, N] times both scales, plus bias[N], of fp8 a and b."""
    if a.is_cuda:
        inside = bias if dtype.itemsize == 2 else None  # cuBLAS has no fp32 bias
        # fast sums stay in the registers of the tensor cores, which keep about 14 bits. gpt2_124m's validation loss was
        # 0.8 % above bf16's with them after 20 M tokens, and 0.1 % without (docs/journal/013-fp8-training.md).
        y = torch._scaled_mm(a, b.t(), a_scale, b_scale, inside, out_dtype=dtype, use_fast_accum=False)
        return y if bias is None or inside is not None else y + bias
    acc = accumulator(dtype)
    y = a.to(acc) @ b.to(acc).t() * (a_scale * b_scale)
    return (y if bias is None else y + bias.to(acc)).to(dtype)


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *w: torch.Tensor
    ) -> torch.Tensor:
        q, t, scale = w
        x8 = rounded(x)
        ctx.save_for_backward(x8.t if ctx.needs_input_grad[1] else None, x8.scale, t, scale)
        return product(x8.q, x8.scale, q, scale, x.dtype, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_t, x_scale, w_t, w_scale = ctx.saved_tensors
        need_x, need_w, need_bias, *_ = ctx.needs_input_grad
        d = rounded(dy, GRADIENT)
        dx = product(d.q, d.scale, w_t, w_scale, dy.dtype) if need_x else None
        dw = product(d.t, d.scale, x_t, x_scale, dy.dtype) if need_w else None
        return dx, dw, dy.sum(0) if need_bias else None, None, None, None


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, w: Rounded, bias: torch.Tensor | None) -> torch.Tensor:
    """x Wᵀ + bias, where `w` is the weight in fp8 and gradients go to `weight`."""
    rows = x.reshape(-1, x.shape[-1])
    missing = -len(rows) % MULTIPLE  # dW sums over the rows
    y: torch.Tensor = _Fp8Linear.apply(F.pad(rows, (0, 0, 0, missing)) if missing else rows, weight, bias, *w)
    return (y[: len(rows)] if missing else y).view(*x.shape[:-1], -1)
