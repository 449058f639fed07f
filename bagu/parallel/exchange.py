"""Differentiable collectives over the rows of local tensors.

    function        forward                           backward
    gather_rows     all-gather                        reduce-scatter (sum)
    scatter_sum     reduce-scatter (sum)              all-gather
    swap_rows       all-to-all                        all-to-all back
    share_gradient  the input as it is                the gradient divided by the number of ranks

The backward of `gather_rows` assumes that each rank has a part of the gradient of the result, and that the parts sum to
it. These are autograd functions over local tensors, not DTensor: DTensor has no rules for bagu's custom ops, nor for
attention on a CPU.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bagu.parallel import collectives
from bagu.parallel.mesh import Group, Mesh


def _gather(x: torch.Tensor, mesh: Mesh, group: Group) -> torch.Tensor:
    out = x.new_empty(x.shape[0] * mesh.size(group), *x.shape[1:])
    collectives.all_gather(mesh, out, x.contiguous(), group)
    return out


def _scatter(x: torch.Tensor, mesh: Mesh, group: Group) -> torch.Tensor:
    out = x.new_empty(x.shape[0] // mesh.size(group), *x.shape[1:])
    collectives.reduce_scatter(mesh, out, x.contiguous(), group)
    return out


def _swap(x: torch.Tensor, receive: Sequence[int], send: Sequence[int], mesh: Mesh, group: Group) -> torch.Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    collectives.all_to_all(mesh, out, x.contiguous(), group, received_rows=list(receive), sent_rows=list(send))
    return out


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, group: Group) -> torch.Tensor:
        ctx.over = mesh, group
        return _gather(x, mesh, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scatter(grads[0], *ctx.over), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, group: Group) -> torch.Tensor:
        ctx.over = mesh, group
        return _scatter(x, mesh, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gather(grads[0], *ctx.over), None, None


class _SwapRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, receive: Sequence[int], send: Sequence[int], mesh: Mesh, group: Group
    ) -> torch.Tensor:
        ctx.back = send, receive, mesh, group
        return _swap(x, receive, send, mesh, group)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _swap(grads[0], *ctx.back), None, None, None, None


class _ShareGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0] / ctx.ranks, None


def gather_rows(x: torch.Tensor, mesh: Mesh, group: Group) -> torch.Tensor:
    """x[n, …] of every rank of the group, concatenated in rank order."""
    y: torch.Tensor = _GatherRows.apply(x, mesh, group)
    return y


def scatter_sum(x: torch.Tensor, mesh: Mesh, group: Group) -> torch.Tensor:
    """The sum of x[n, …] over the group; each rank keeps its share of the n rows."""
    y: torch.Tensor = _ScatterSum.apply(x, mesh, group)
    return y


def swap_rows(x: torch.Tensor, receive: Sequence[int], send: Sequence[int], mesh: Mesh, group: Group) -> torch.Tensor:
    """Send `send[r]` rows of x to rank r of the group, in order; receive `receive[r]` rows of rank r."""
    y: torch.Tensor = _SwapRows.apply(x, receive, send, mesh, group)
    return y


def share_gradient(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """x, whose gradient is divided by `ranks`: for a value that every rank computes and adds to its loss in full, where
    gradients are summed over ranks."""
    y: torch.Tensor = _ShareGradient.apply(x, ranks)
    return y
