"""The collectives of training, over a named group of a mesh. Each counts its bytes in the mesh's `traffic`."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from bagu.parallel.mesh import Group, Mesh


def all_reduce(
    mesh: Mesh, tensor: torch.Tensor, group: Group, *, op: Any = dist.ReduceOp.SUM, async_op: bool = False
) -> dist.Work | None:
    """Sum (or `op`) over the group, in place. A group of one rank has nothing to do."""
    if (ranks := mesh.group(group)) is None:
        return None
    mesh.traffic.add("all_reduce", group, tensor.nbytes, mesh.size(group))
    return _done(mesh, dist.all_reduce(tensor, op=op, group=ranks, async_op=True), async_op)


def reduce_scatter(
    mesh: Mesh, part: torch.Tensor, whole: torch.Tensor, group: Group, *, async_op: bool = False
) -> dist.Work | None:
    """Sum `whole` over the group; rank r gets its r-th part."""
    if (ranks := mesh.group(group)) is None:
        part.copy_(whole)
        return None
    mesh.traffic.add("reduce_scatter", group, whole.nbytes, mesh.size(group))
    return _done(mesh, _REDUCE_SCATTER(part, whole, group=ranks, async_op=True), async_op)


def all_gather(
    mesh: Mesh, whole: torch.Tensor, part: torch.Tensor, group: Group, *, async_op: bool = False
) -> dist.Work | None:
    """Concatenate the parts of the group's ranks into `whole`."""
    if (ranks := mesh.group(group)) is None:
        whole.copy_(part)
        return None
    mesh.traffic.add("all_gather", group, whole.nbytes, mesh.size(group))
    return _done(mesh, ALL_GATHER(whole, part, group=ranks, async_op=True), async_op)


def _done(mesh: Mesh, work: dist.Work | None, async_op: bool) -> dist.Work | None:
    """The handle of a collective, or None after waiting for it."""
    if async_op:
        return work
    wait_for(mesh, work)
    return None


def all_to_all(
    mesh: Mesh,
    received: torch.Tensor,
    sent: torch.Tensor,
    group: Group,
    *,
    received_rows: list[int] | None = None,
    sent_rows: list[int] | None = None,
) -> None:
    """Send the i-th part of `sent` (or its next `sent_rows[i]` rows) to rank i of the group."""
    if (ranks := mesh.group(group)) is None:
        received.copy_(sent)
        return
    others = None  # the bytes for other ranks, where experts divide the rows unequally
    if sent_rows is not None and len(sent):
        others = sent.nbytes // len(sent) * (len(sent) - sent_rows[mesh.coordinate(group)])
    mesh.traffic.add("all_to_all", group, sent.nbytes, mesh.size(group), others)
    wait_for(mesh, dist.all_to_all_single(received, sent, received_rows, sent_rows, group=ranks, async_op=True))


def wait_for(mesh: Mesh, *works: dist.Work | None) -> None:
    """Wait for collectives that were started with `async_op`, and count the time.

    With NCCL the host does not wait: the device's stream does, and the time is not known here.
    """
    start = time.perf_counter()
    for work in works:
        if work is not None:
            work.wait()
    mesh.traffic.waited_s += time.perf_counter() - start


def from_rank_0(mesh: Mesh | None, value: int) -> int:
    """The value that rank 0 of the job has. Waits for it, so that what rank 0 did before is done."""
    if mesh is None:
        return value
    number = torch.tensor(value, dtype=torch.int64, device=mesh.device)
    dist.broadcast(number, src=0)
    return int(number)


def _named(new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 renames two collectives, and warns at the old names."""
    function: Callable[..., Any] = getattr(dist, new, None) or getattr(dist, old)
    return function


_REDUCE_SCATTER = _named("reduce_scatter_single", "reduce_scatter_tensor")
ALL_GATHER = _named("all_gather_single", "all_gather_into_tensor")
