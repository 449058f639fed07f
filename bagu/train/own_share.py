"""A rank makes its own micro-batches of a step, and learns the counts of the others' from the ranks that make them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import astuple, dataclass
from typing import Any

import torch

from bagu.data.loader import Loader
from bagu.parallel.collectives import all_gather
from bagu.parallel.mesh import Mesh
from bagu.train.cross_entropy import CrossEntropy
from bagu.train.state import TrainState
from bagu.types import Batch


@dataclass(frozen=True)
class Counts:
    """What the totals of a step need of a micro-batch (cross_entropy.TargetTotals)."""

    num_tokens: int
    num_targets: int
    target_bytes: int
    num_padding: int


def prefetch(loader: Any, state: TrainState) -> AbstractContextManager[Iterator[Sequence[Any]]]:
    """The micro-batches of the steps to come; of other ranks' the counts alone, if no more of them is needed."""
    mesh, start = state.mesh, state.data_step
    ranks = 1 if mesh is None else mesh.size("data")
    counts_do = isinstance(loader, Loader) and isinstance(state.loss, CrossEntropy)
    equal = state.shares is None  # shares that change from step to step need every micro-batch
    if mesh is None or ranks == 1 or not counts_do or not equal or loader.config.micro_batches % ranks:
        found: AbstractContextManager[Iterator[Sequence[Any]]] = loader.prefetch(start)
        return found
    return _shared(loader, start, mesh)


@contextmanager
def _shared(loader: Loader, start: int, mesh: Mesh) -> Iterator[Iterator[list[Batch | Counts]]]:
    numbers = range(mesh.coordinate("data"), loader.config.micro_batches, mesh.size("data"))
    with loader.prefetch_share(start, numbers) as batches:
        yield (_with_others(mesh, own) for own in batches)


def _with_others(mesh: Mesh, own: Mapping[int, Batch]) -> list[Batch | Counts]:
    """All micro-batches of a step in order, from this rank's by number. Every rank of the data group calls it."""
    counts = [Counts(b.num_tokens, b.num_targets, b.target_bytes, b.num_padding) for b in own.values()]
    mine = torch.tensor([astuple(c) for c in counts], device=mesh.device).view(-1)
    every = mine.new_empty(mesh.size("data") * len(mine))
    all_gather(mesh, every, mine, "data")
    table = every.view(mesh.size("data"), len(own), -1).transpose(0, 1).flatten(0, 1).tolist()  # by number
    return [own[number] if number in own else Counts(*row) for number, row in enumerate(table)]
