"""One linear layer per expert in PyTorch: a grouped GEMM if one is available, else a loop over experts.

The number of rows per expert is data, and a loop over it cannot be one graph. So the two grouped products are custom
ops, opaque to the compiler and counted by FLOP counters: rows (y, and dx with transposed weights) and weights (dw).
Eager calls run the same functions as autograd nodes: the first call of a custom op imports the compiler. A DTensor,
torch.func and forward-mode AD use the loop, which is ordinary PyTorch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from bagu.ops.call import eager
from bagu.ops.call.custom import needs_custom_op
from bagu.ops.matmul.torch_backend import invariant_rows_of, widens


def forward(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor]:
    spread = hasattr(offsets, "full_tensor")  # a DTensor
    if not spread and not eager.transformed():
        return (multiply_rows(x, w, offsets),)
    shares = list(_shares(offsets.full_tensor() if spread else offsets))  # type: ignore[attr-defined]
    parts = [x[a:b] @ w[e].mT for e, (a, b) in enumerate(shares)]
    return (torch.cat((*parts, x.new_zeros(x.shape[0] - shares[-1][1], w.shape[1]))),)


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return multiply_rows(dy, w.mT, offsets), multiply_weights(dy, x, offsets)


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w, offsets)
        y = x.new_zeros(x.shape[0], w.shape[1])
        for (start, end), own in zip(_shares(offsets), w, strict=True):
            if end > start:
                y[start:end] = invariant_rows_of(x[start:end], own, None)
        return y

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *backward(douts[0], *ctx.saved_tensors), None


def invariant_forward(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor]:
    return (_Blocks.apply(x, w, offsets),)


def multiply_rows(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """y[T, N]: each expert's rows of x[T, K] times its w[e].T, and zeros past the last end. Differentiable."""
    values = x, w, offsets
    return torch.ops.bagu.grouped_rows(*values) if needs_custom_op(values) else _Rows.apply(*values)


def multiply_weights(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """dw[E, N, K]: each expert's rows of dy[T, N], transposed, times its rows of x[T, K]. Differentiable."""
    values = dy, x, offsets
    return torch.ops.bagu.grouped_weights(*values) if needs_custom_op(values) else _Weights.apply(*values)


def _multiply_rows(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    if one_launch(x, w):
        y = torch._grouped_mm(x, w.mT, offsets)
        # The GEMM does not write the rows past the last end, and reading their number would synchronize the device. So
        # one pass over y clears them: 0.4 ms beside the 1.4 ms of 131072 x 1536 x 2048 with 128 experts on an H200.
        spare = torch.arange(x.shape[0], device=x.device) >= offsets[-1]
        return y.masked_fill_(spare.unsqueeze(-1), 0)
    y = x.new_empty(x.shape[0], w.shape[1])
    end = 0
    for e, (start, end) in enumerate(_shares(offsets)):
        if end > start:
            _multiply_into(y[start:end], x[start:end], w[e].mT)
    y[end:].zero_()
    return y


def _multiply_weights(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    if one_launch(x, dy):
        return torch._grouped_mm(dy.mT, x, offsets)
    dw = x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])
    for e, (start, end) in enumerate(_shares(offsets)):
        _multiply_into(dw[e], dy[start:end].mT, x[start:end])  # a sum over no rows is zero
    return dw


def _multiply_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    if widens(a):
        out.copy_(torch.mm(a.float(), b.float()))
    else:
        torch.mm(a, b, out=out)


def _shares(offsets: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(start, end) of each expert's rows. On CUDA this synchronizes with the device."""
    ends = offsets.tolist()
    return zip([0, *ends[:-1]], ends, strict=True)


def one_launch(*operands: torch.Tensor) -> bool:
    """Whether CUTLASS's grouped GEMM supports these: bf16, rows at multiples of 16 bytes (torch 2.11 to 2.13)."""

    def aligned(t: torch.Tensor) -> bool:
        unit, row = sorted(t.stride()[-2:])
        return unit == 1 and all(n * t.element_size() % 16 == 0 for n in (row, *t.stride()[:-2], t.storage_offset()))

    return all(t.is_cuda and t.dtype == torch.bfloat16 and t.numel() > 0 and aligned(t) for t in operands)


def _rows_like(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


def _weights_like(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return x.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _link(
    ctx: torch.autograd.function.FunctionCtx, dy: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
    x, w, offsets = ctx.saved_tensors  # type: ignore[attr-defined]
    dx, dw, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
    return (
        multiply_rows(dy, w.mT, offsets) if dx else None,
        multiply_weights(dy, x, offsets) if dw else None,
        None,
    )


def _weights_link(
    ctx: torch.autograd.function.FunctionCtx, ddw: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, None]:
    dy, x, offsets = ctx.saved_tensors  # type: ignore[attr-defined]
    return multiply_rows(x, ddw, offsets), multiply_rows(dy, ddw.mT, offsets), None


class _Rows(torch.autograd.Function):
    forward = staticmethod(_multiply_rows)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_link)


class _Weights(torch.autograd.Function):
    forward = staticmethod(_multiply_weights)
    setup_context = staticmethod(_keep)
    backward = staticmethod(_weights_link)


for _name, _run, _like, _backward in (
    ("bagu::grouped_rows", _multiply_rows, _rows_like, _link),
    ("bagu::grouped_weights", _multiply_weights, _weights_like, _weights_link),
):
    _op = torch.library.custom_op(_name, _run, mutates_args=())
    _op.register_fake(_like)
    _op.register_autograd(_backward, setup_context=_keep)


@register_flop_formula(torch.ops.bagu.grouped_rows)
def _rows_flops(x: torch.Size, w: torch.Size, offsets: torch.Size, **_: object) -> int:
    return 2 * x[0] * x[1] * w[1]


@register_flop_formula(torch.ops.bagu.grouped_weights)
def _weights_flops(dy: torch.Size, x: torch.Size, offsets: torch.Size, **_: object) -> int:
    return 2 * x[0] * x[1] * dy[1]
