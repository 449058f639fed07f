"""Differentiable collectives over the first dimension of local tensors.

    function        forward                           backward
    gather_rows     all-gather                        reduce-scatter (sum)
    scatter_sum     reduce-scatter (sum)              all-gather
    sum_ranks       all-reduce (sum)                  the gradient as it is
    swap_rows       all-to-all                        all-to-all back
    share_gradient  the input as it is                the gradient divided by the number of ranks

The backward of `gather_rows` and `scatter_sum` assumes that each rank has a part of the gradient of the result, and that
the parts sum to it. `sum_ranks` assumes that all ranks compute the same loss from the result.

These are autograd functions over local tensors, not DTensor: DTensor has no rules for bagu's custom ops, nor for attention
on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["all_gather", "gather_rows", "reduce_scatter", "scatter_sum", "share_gradient", "sum_ranks", "swap_rows"]

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The rows of all ranks, in rank order."""
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    _all_gather(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's share of the rows of the sum over ranks."""
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=group)
    return out


def _all_to_all(x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return reduce_scatter(grads[0], ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return all_gather(grads[0], ctx.group), None


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], None


class _SwapRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.rest = receive, send, group
        return _all_to_all(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        receive, send, group = ctx.rest
        return _all_to_all(grads[0], send, receive, group), None, None, None


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0] / ctx.ranks, None


def gather_rows(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """x[n, …] of every rank, concatenated in rank order."""
    y: torch.Tensor = _GatherRows.apply(x, group)
    return y


def scatter_sum(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of x[n, …] over ranks; each rank keeps its share of the n rows."""
    y: torch.Tensor = _ScatterSum.apply(x, group)
    return y


def sum_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of x over ranks."""
    y: torch.Tensor = _SumRanks.apply(x, group)
    return y


def swap_rows(x: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send `send[r]` rows of x to rank r, in order; receive `receive[r]` rows of rank r."""
    y: torch.Tensor = _SwapRows.apply(x, receive, send, group)
    return y


def share_gradient(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """x, whose gradient is divided by `ranks`: for a value that every rank computes and adds to its loss in full, where
    gradients are summed over ranks."""
    y: torch.Tensor = _ShareGradient.apply(x, ranks)
    return y
