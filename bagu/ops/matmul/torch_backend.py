"""A linear layer in PyTorch. `F.linear` is one node that the compiler, DTensor and FLOP counters support.

The epilogue is separate ops on what F.linear returns. On a GPU a 16-bit product is therefore rounded before it; on a
CPU it is widened to fp32 and rounded once.

On a CPU without bf16 units, bf16 is widened to fp32 and rounded once, as in the definition: torch's fallback is a
naive loop, 300 times as slow at 512 x 576 x 1536 on a Neoverse-N1, and it prints a C++ stack trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from bagu.machine.device import onednn_has_bf16
from bagu.ops.activations import activate, activation_backward
from bagu.ops.call.eager import constant, without_autocast
from bagu.ops.contract.signature import accumulator
from bagu.ops.invariant import invariant_rows
from bagu.ops.invariant.mode import in_blocks, times_sigmoid
from bagu.ops.matmul.spec import Args

EVERY = dict.fromkeys(("x", "w", "bias", "residual", "row_scale", "column_scale"), True)
cpu_has_bf16 = constant(onednn_has_bf16)
Gradients = tuple[torch.Tensor | None, ...]


def widens(x: torch.Tensor) -> bool:
    """Whether products of x are computed in fp32 because the CPU has no products in x's dtype."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not cpu_has_bf16()


def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if widens(x):
        return F.linear(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)
    return F.linear(x, w, bias)


def _wide(x: torch.Tensor, *scales: torch.Tensor | None) -> torch.dtype:
    """The dtype of a product before an epilogue: on a CPU 16 bits are widened, and rounded once after it.

    With scales on a GPU too, where that is slow: their fp32 gradients are sums of these products.
    """
    widened = x.device.type == "cpu" or any(s is not None for s in scales)
    return accumulator(x.dtype) if widened else x.dtype


def _sums(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    return F.linear(x.to(wide), w.to(wide), None if bias is None else bias.to(wide))


def scaled(
    sums: torch.Tensor, bias: torch.Tensor | None, row_scale: torch.Tensor | None, column_scale: torch.Tensor | None
) -> torch.Tensor:
    """row_scale * column_scale * sums + bias, in the dtype of the accumulator."""
    acc = accumulator(sums.dtype)
    z = sums.to(acc)
    z = z if row_scale is None else z * row_scale.to(acc).unsqueeze(-1)
    z = z if column_scale is None else z * column_scale.to(acc)
    return z if bias is None else z + bias.to(acc)


def forward(a: Args) -> tuple[torch.Tensor]:
    x = a.x
    if a.row_scale is not None or a.column_scale is not None:
        z = scaled(_sums(x, a.w, None, _wide(x, a.row_scale, a.column_scale)), a.bias, a.row_scale, a.column_scale)
    elif a.activation is not None or a.residual is not None:
        z = _sums(x, a.w, a.bias, _wide(x))
    else:
        return (linear(x, a.w, a.bias),)
    y = activate(z, a.activation)
    return ((y if a.residual is None else y + a.residual).to(x.dtype),)


def backward(a: Args, dy: torch.Tensor, needs: Mapping[str, bool] = EVERY) -> Gradients:
    """The gradients of x, w, bias, residual, row_scale and column_scale; None for those that are not needed.

    The sums before the epilogue are computed again and not saved: a forward then writes y alone, whether or not there
    will be a backward. Where gradients are needed, the automatic choice is the torch backend, which saves them.
    """
    x, w, bias, row_scale, column_scale = a.x, a.w, a.bias, a.row_scale, a.column_scale
    residual = dy.clone() if needs["residual"] else None  # a custom op may not return its input
    if a.activation is None and row_scale is None and column_scale is None:
        return *of_product(dy, x, w, bias, needs), residual, None, None
    wide = _wide(x, row_scale, column_scale)
    sums = _sums(x, w, None, wide)
    dz = dy.to(accumulator(x.dtype))
    if a.activation is not None:
        dz = activation_backward(dz, scaled(sums, bias, row_scale, column_scale), a.activation)
    drow = dcolumn = dbias = None
    if row_scale is not None and needs["row_scale"]:
        drow = scaled(dz * sums, None, None, column_scale).sum(-1).to(row_scale.dtype)
    if column_scale is not None and needs["column_scale"]:
        each = scaled(dz * sums, None, row_scale, None)
        dcolumn = each.reshape(-1, w.shape[0]).sum(0).to(column_scale.dtype)
    if bias is not None and needs["bias"]:
        dbias = dz.reshape(-1, w.shape[0]).sum(0).to(bias.dtype)
    dsums = scaled(dz, None, row_scale, column_scale).to(wide)
    dx, dw, _ = of_product(dsums, x.to(wide), w.to(wide), None, needs)
    return (
        None if dx is None else dx.to(x.dtype),
        None if dw is None else dw.to(w.dtype),
        dbias,
        residual,
        drow,
        dcolumn,
    )


def of_product(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, needs: Mapping[str, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of x, w and bias of x wᵀ + bias."""
    if widens(x):
        wide = of_product(dy.float(), x.float(), w.float(), None if bias is None else bias.float(), needs)
        dx, dw, dbias = (None if g is None else g.to(x.dtype) for g in wide)
        return dx, dw, dbias
    M = x.shape[:-1].numel()
    rows, features = dy.reshape(M, dy.shape[-1]), x.reshape(M, x.shape[-1])
    dbias = rows.sum(0) if bias is not None and needs["bias"] else None
    return dy @ w if needs["x"] else None, rows.mT @ features if needs["w"] else None, dbias


def invariant_rows_of(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[M, K] wᵀ + bias, each row by itself."""
    if invariant_rows.available(x.dtype):
        return invariant_rows.product(x, w, bias).to(x.dtype)
    return in_blocks(lambda block: linear(block, w, bias), x)


def _invariant_epilogue(a: Args) -> torch.Tensor:
    """The whole definition, each row by itself; sums are not rounded before the epilogue."""
    x = a.x
    rows, wide = x.reshape(-1, x.shape[-1]), _wide(x)
    if invariant_rows.available(x.dtype):
        sums = invariant_rows.product(rows, a.w)
    else:
        sums = in_blocks(lambda block: F.linear(block.to(wide), a.w.to(wide)), rows)
    z = scaled(sums.view(*x.shape[:-1], a.w.shape[0]), a.bias, a.row_scale, a.column_scale)
    y = times_sigmoid(z, z) if a.activation == "silu" else activate(z, a.activation)
    return (y if a.residual is None else y + a.residual).to(x.dtype)


class _Invariant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Any) -> torch.Tensor:
        a = Args(*values)
        ctx.save_for_backward(a.x, a.w, a.bias, a.row_scale, a.column_scale)
        ctx.activation = a.activation
        if a.residual is None and a.row_scale is None and a.column_scale is None and a.activation is None:
            rows = invariant_rows_of(a.x.reshape(-1, a.x.shape[-1]), a.w, a.bias)
            return rows.view(*a.x.shape[:-1], a.w.shape[0])
        return _invariant_epilogue(a)

    @staticmethod
    @without_autocast
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = dict(zip(EVERY, ctx.needs_input_grad[:6], strict=True))
        x, w, bias, row_scale, column_scale = ctx.saved_tensors
        a = Args(x, w, bias, None, row_scale, column_scale, ctx.activation)
        return *backward(a, douts[0], needs), None


def invariant_forward(a: Args) -> tuple[torch.Tensor]:
    return (_Invariant.apply(*a),)
