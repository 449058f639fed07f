"""Where gradients go: summed over a step's micro-batches and, under a mesh, over its ranks.

A hook hands over each gradient as soon as it is complete, and autograd keeps nothing. The first micro-batch is copied,
later ones are added, in the masters' dtype: micro-batches are summed in fp32 also if the model is bf16, and a bf16
gradient is freed when its layer's backward ends. parallel/spread.py says over which ranks a parameter's gradient is
summed; a bucket or unit has parameters of one spread.

`WholeGradients` keeps the gradient of every parameter. Its ranks are summed once a step, during the last backward.
`DividedGradients` (ZeRO-2 and -3) keeps this rank's part. Each backward pass fills a temporary buffer per unit, which
is reduce-scattered when it is complete: m micro-batches cost m reduce-scatters. At most OPEN of them are open at once,
because each keeps the whole gradient of a unit alive: the next one waits for the last, as the backward goes on.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Protocol

import torch
import torch.distributed as dist

from bagu.parallel.collectives import all_reduce, reduce_scatter, wait_for
from bagu.parallel.data_parallel import Bucket, Reducer, backward_order, buckets_of
from bagu.parallel.mesh import Mesh
from bagu.parallel.spread import Spread, sum_ends
from bagu.parallel.zero import Unit

OPEN = 1  # reduce-scatters: that of one unit overlaps the backward of the next, as in FSDP2


class Place(Protocol):
    """A parameter's range in the flat order: a `Slot`."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    def of(self, flat: torch.Tensor, offset: int = 0) -> torch.Tensor: ...


class WholeGradients:
    """The gradients of all parameters in one flat buffer `grad`. `units` (ZeRO-1) are reduced to this rank's parts."""

    def __init__(self, slots: Sequence[Place], size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self.grad = torch.zeros(size, dtype=dtype, device=device)
        self._places = [slot.of(self.grad) for slot in slots]
        self._has_grad = [False] * len(slots)
        self._backwards = 1  # that are still to come in this step
        self._reducer: Reducer | None = None
        self._after: Callable[[], None] = lambda: None
        self._counted = [self.grad]  # the parts that this rank adds to the norm

    def reduce_over(self, mesh: Mesh, depth: Sequence[int], bucket_bytes: int, spreads: Sequence[Spread]) -> None:
        """Sum over the ranks of a mesh. `depth` is each parameter's place in the model, from the input; adjacent
        parameters of one spread share buckets."""
        limit = bucket_bytes // self.grad.element_size()
        ranges = [(slot.start, slot.stop) for slot in self.slots]
        buckets = backward_order(buckets_of(ranges, limit, spreads), depth)
        spread_of = {bucket.start: spreads[bucket.members[0]] for bucket in buckets}

        def reduce(bucket: Bucket) -> dist.Work | None:
            self._zero_missing(bucket.members)
            group = spread_of[bucket.start].data_group(mesh)
            return all_reduce(mesh, self.grad[bucket.start : bucket.stop], group, async_op=True)

        self._reducer = Reducer(mesh, buckets, reduce)
        whole = [(self.grad[bucket.start : bucket.stop], spread_of[bucket.start]) for bucket in buckets]
        self._after = lambda: sum_over_model(mesh, whole)
        if len(set(spread_of.values())) == 1:  # one reduction of the whole buffer
            whole = [(self.grad, spreads[0])]
        self._counted = [part for part, spread in whole if spread.counted(mesh, divided=False)]

    def scatter_over(self, mesh: Mesh, units: Sequence[Unit], depth: Sequence[int]) -> None:
        """Sum to this rank's part of each unit, in place: the other parts are undefined afterwards."""
        by_start = {unit.start: unit for unit in units}

        def reduce(bucket: Bucket) -> dist.Work | None:
            self._zero_missing(bucket.members)
            unit = by_start[bucket.start]
            whole = self.grad[unit.start : unit.stop]
            return reduce_scatter(mesh, unit.part_of(whole), whole, "shard", async_op=True)

        parts = [(unit.part_of(self.grad[unit.start : unit.stop]), unit.spread) for unit in units]

        def sum_replicas() -> None:  # hybrid: the parts over the replicas
            sum_parts(mesh, parts)
            sum_over_model(mesh, parts)

        self._reducer = Reducer(mesh, backward_order([unit.bucket for unit in units], depth), reduce)
        self._after = sum_replicas
        self._counted = [part for part, spread in parts if spread.counted(mesh, divided=True)]

    def take(self, index: int, grad: torch.Tensor) -> None:
        """Add the complete gradient of a parameter in one backward."""
        if self._has_grad[index]:
            self._places[index].add_(grad)
        else:
            self._places[index].copy_(grad)
            self._has_grad[index] = True
        if self._reducer is not None and self._backwards == 1:
            self._reducer.ready(index)

    def begin(self, backwards: int | None) -> None:
        """Start a step. `backwards` is None if their number is not known: all sums over ranks are then at the end."""
        self._has_grad = [False] * len(self._has_grad)
        self._backwards = 0 if backwards is None else backwards
        self._expect_last()

    def end_backward(self) -> None:
        self._backwards -= 1
        self._expect_last()

    def _expect_last(self) -> None:
        if self._reducer is not None and self._backwards == 1:
            self._reducer.begin()

    def finish(self) -> torch.Tensor:
        """Complete the sums; return the norm of what this rank counts. A parameter without a gradient (an expert that
        no token chose) still holds the last step's: zero it."""
        if self._reducer is None:
            self._zero_missing(range(len(self._has_grad)))
        else:
            if not self._reducer.begun:
                self._reducer.begin()
            self._reducer.finish()
            self._after()
        return norm_of(self._counted, self.grad)

    def _zero_missing(self, indices: Sequence[int]) -> None:
        for index in indices:
            if not self._has_grad[index]:
                self._places[index].zero_()


class DividedGradients:
    """This rank's part of the gradient: the parts of all units, one after another, in `grad`.

    `used(unit)` is called when the gradients of a unit are complete: its parameters are not needed any more.
    """

    def __init__(
        self,
        mesh: Mesh,
        slots: Sequence[Place],
        units: Sequence[Unit],
        depth: Sequence[int],
        dtype: torch.dtype,
        used: Callable[[Unit], None],
    ) -> None:
        self.mesh, self.slots, self.used = mesh, slots, used
        self.grad = torch.zeros(sum(unit.part_size for unit in units), dtype=dtype, device=mesh.device)
        self._by_start = {unit.start: unit for unit in units}
        self._unit_of = {index: unit for unit in units for index in unit.members}
        self._filling: dict[int, torch.Tensor] = {}  # a unit's whole gradient in this backward, by its start
        self._later: dict[int, torch.Tensor] = {}  # being reduced, to be added to those of earlier backwards
        self._first = True
        order = backward_order([unit.bucket for unit in units], depth)
        self._reducer = Reducer(mesh, order, self._reduce, most=OPEN, done=self._add)
        runs = [list(run) for _, run in groupby(units, key=lambda unit: unit.spread)]  # adjacent ones at once
        self._parts = [(self.grad[r[0].local : r[-1].local + r[-1].part_size], r[0].spread) for r in runs]
        self._counted = [part for part, spread in self._parts if spread.counted(mesh, divided=True)]

    def take(self, index: int, grad: torch.Tensor) -> None:
        unit = self._unit_of[index]
        self.slots[index].of(self._whole(unit), unit.start).copy_(grad)
        self._reducer.ready(index)

    def _whole(self, unit: Unit) -> torch.Tensor:
        if unit.start not in self._filling:  # zeros: a parameter may have no gradient
            self._filling[unit.start] = torch.zeros(unit.size, dtype=self.grad.dtype, device=self.grad.device)
        return self._filling[unit.start]

    def _reduce(self, bucket: Bucket) -> dist.Work | None:
        unit = self._by_start[bucket.start]
        whole, part = self._whole(unit), self._place(unit)
        del self._filling[unit.start]
        if not self._first:
            part = self._later[unit.start] = torch.empty_like(part)
        work = reduce_scatter(self.mesh, part, whole, "shard", async_op=True)
        self.used(unit)
        return work

    def _add(self, bucket: Bucket) -> None:
        """A unit is reduced: add its part to those of earlier backwards."""
        if not self._first:
            self._place(self._by_start[bucket.start]).add_(self._later.pop(bucket.start))

    def _place(self, unit: Unit) -> torch.Tensor:
        return self.grad[unit.local : unit.local + unit.part_size]

    def begin(self, backwards: int | None) -> None:
        self._first = True
        self._reducer.begin()

    def end_backward(self) -> None:
        self._reducer.finish()
        self._first = False
        self._reducer.begin()

    def finish(self) -> torch.Tensor:
        """Complete the sums; return the norm of what this rank counts of its part."""
        sum_parts(self.mesh, self._parts)
        sum_over_model(self.mesh, self._parts)
        return norm_of(self._counted, self.grad)


Parts = Sequence[tuple[torch.Tensor, Spread]]  # ranges of a gradient buffer, each of parameters of one spread


def sum_parts(mesh: Mesh, parts: Parts) -> None:
    """Sum this rank's parts of a divided gradient over the ranks that have the same parts."""
    wait_for(mesh, *[all_reduce(mesh, part, spread.replica_group(mesh), async_op=True) for part, spread in parts])


def sum_over_model(mesh: Mesh, parts: Parts) -> None:
    """Complete sums over the ranks of tp and pp, which all have a part of a gradient too."""
    over_tp = [part for part, spread in parts if spread.summed_over_tp(mesh)]
    wait_for(mesh, *[all_reduce(mesh, part, "tp", async_op=True) for part in over_tp])
    for part, spread in parts:
        if spread.tied:
            sum_ends(mesh, part)


def norm_of(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The norm of all parts together."""
    if not parts:
        return like.new_zeros(())
    norms = [torch.linalg.vector_norm(part) for part in parts]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
