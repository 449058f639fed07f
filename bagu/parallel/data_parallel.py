"""Data parallelism: buckets of a flat gradient buffer, reduced while the backward still runs.

Every rank computes the gradients of its own micro-batches; their sum is the gradient of the global batch, because each
loss is divided by the counts of the whole batch. A bucket is a range of the flat buffer. It is reduced as soon as the
last micro-batch has produced the gradients of all of its parameters, and the backward of earlier layers hides the
communication. Ranks must start collectives in the same order, so a bucket also waits for the buckets before it: the
order is that of the backward, from the last layer to the first.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bagu.parallel.collectives import all_gather, wait_for
from bagu.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The range [start, stop) of a flat buffer, with the parameters (by index) that lie in it."""

    start: int
    stop: int
    members: tuple[int, ...]


def buckets_of(ranges: Sequence[tuple[int, int]], limit: int, kinds: Sequence[object] | None = None) -> list[Bucket]:
    """Adjacent parameters in buckets of at least `limit` elements. `ranges` are their places in the flat buffer. A
    bucket ends where the parameters' `kinds` change: those are reduced over other ranks."""
    buckets, members = [], list[int]()
    for index, (_, stop) in enumerate(ranges):
        members.append(index)
        start = ranges[members[0]][0]
        last = index == len(ranges) - 1 or (kinds is not None and kinds[index + 1] != kinds[index])
        if last or stop - start >= limit:
            buckets.append(Bucket(start=start, stop=stop, members=tuple(members)))
            members = []
    return buckets


def backward_order(buckets: Sequence[Bucket], depth: Sequence[int]) -> list[Bucket]:
    """The buckets in the order in which a backward completes them. `depth` is each parameter's place in the model: the
    gradient of the first layer comes last."""
    return sorted(buckets, key=lambda b: -min(depth[i] for i in b.members))


class Reducer:
    """Starts `reduce` for each bucket when its parameters are ready, in order; `finish` starts the rest and waits.

    `reduce` starts the collective of a bucket and returns its handle, or None if there is nothing to wait for. A handle
    keeps what it sends alive: with `most`, no more collectives than that are open at once. `done` is called after each.
    """

    def __init__(
        self,
        mesh: Mesh,
        buckets: Sequence[Bucket],
        reduce: Callable[[Bucket], dist.Work | None],
        *,
        most: int | None = None,
        done: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self.mesh, self.buckets, self.reduce, self.done = mesh, tuple(buckets), reduce, done
        self._most = len(self.buckets) if most is None else most
        self._bucket_of = {index: at for at, bucket in enumerate(self.buckets) for index in bucket.members}
        self._waiting: list[int] = []
        self._next = len(self.buckets)
        self._works: deque[tuple[Bucket, dist.Work | None]] = deque()

    @property
    def begun(self) -> bool:
        """Whether `begin` was called since the last `finish`."""
        return bool(self._waiting)

    def begin(self) -> None:
        """Start to reduce: from now on gradients are complete when they arrive."""
        self._waiting = [len(bucket.members) for bucket in self.buckets]
        self._next = 0
        self._works.clear()

    def ready(self, index: int) -> None:
        """The gradient of a parameter is complete on this rank."""
        self._waiting[self._bucket_of[index]] -= 1
        while self._next < len(self.buckets) and self._waiting[self._next] == 0:
            self._start()

    def finish(self) -> None:
        """Reduce the buckets of parameters that had no gradient too, and wait for all of them."""
        while self._next < len(self.buckets):
            self._start()
        self._wait(0)
        self._waiting = []

    def _start(self) -> None:
        self._wait(self._most - 1)
        bucket = self.buckets[self._next]
        self._works.append((bucket, self.reduce(bucket)))
        self._next += 1

    def _wait(self, left: int) -> None:
        """Wait for the oldest collectives until at most `left` are open."""
        while len(self._works) > left:
            bucket, work = self._works.popleft()
            wait_for(self.mesh, work)
            self.done(bucket)


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """The scalars of a step over all ranks. They are equal, to the bit, on every rank."""

    sums: list[float]
    peaks: list[float]
    norm: float  # of the gradient
    seconds: list[float]  # that each rank computed, by its number, if they were given


def combine(
    mesh: Mesh, sums: torch.Tensor, peaks: torch.Tensor, norm: torch.Tensor, seconds: float | None = None
) -> StepSums:
    """Combine the scalars of this rank with those of the others, in one collective of a few bytes.

    `sums` are added over the ranks with other tokens and over pipeline stages; ranks of tp have equal ones. `norm` is
    the norm of the gradients that this rank counts, `seconds` how long it computed. Every rank gathers all rows and
    adds them in the same order, so that all ranks decide the same (whether to skip, how to clip, the next shares).
    """
    parts = [sums, peaks] if seconds is None else [sums, peaks, norm.new_tensor([seconds], dtype=torch.float64)]
    row = torch.cat([part.double() for part in (*parts, norm.view(1))])
    rows = row.new_empty(mesh.size("all"), len(row))
    all_gather(mesh, rows.view(-1), row, "all")
    table = rows.cpu()
    one_of_tp = [rank for rank in range(len(table)) if mesh.config.coordinate("tp", rank) == 0]
    return StepSums(
        sums=table[one_of_tp, : len(sums)].sum(0).tolist(),
        peaks=table[:, len(sums) : len(sums) + len(peaks)].amax(0).tolist(),
        norm=float(torch.linalg.vector_norm(table[:, -1])),
        seconds=[] if seconds is None else table[:, -2].tolist(),
    )
