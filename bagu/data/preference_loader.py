"""The loader of preferences: which pairs are in which micro-batch.

A micro-batch has `rows * context` tokens, as in the loader of texts. It takes the pairs of an epoch in shuffled order
while they fit, so the number of pairs in a step varies and the loss divides by it. Step s is a function of (seed, s)
and the data only. A sequence longer than `context`, or a pair longer than a micro-batch, is left out and counted.
"""

import threading
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from bagu.data.loader import DataConfig
from bagu.data.mix import Mixture
from bagu.data.order import Order, shuffled
from bagu.data.pack import Place
from bagu.data.preference_batch import PreferenceBatch, batches_of, max_sequences
from bagu.data.preference_set import PreferenceSet
from bagu.data.prefetch import Prefetch
from bagu.errors import ArgumentError


class EpochRows:
    """The micro-batches of a set: for each epoch its units in a new order, each row taking units while they fit."""

    def __init__(self, lengths: np.ndarray, *, capacity: int, max_units: int, order: Order) -> None:
        self.lengths, self.capacity, self.max_units, self.order = lengths, capacity, max_units, order
        self.epoch = lru_cache(maxsize=2)(self._cut)  # the rows of an epoch, each an array of units
        self._ends = [0]  # number of rows before each epoch
        self._lock = threading.Lock()

    def place(self, number: int) -> Place:
        """The epoch of row `number`, and its number there."""
        with self._lock:
            while self._ends[-1] <= number:
                self._ends.append(self._ends[-1] + len(self.epoch(len(self._ends) - 1)))
            epoch = int(np.searchsorted(self._ends, number, side="right")) - 1
            return Place(epoch, number - self._ends[epoch])

    def row(self, number: int) -> np.ndarray:
        """The units of row `number`."""
        place = self.place(number)
        return self.epoch(place.epoch)[place.row]

    def _cut(self, epoch: int) -> list[np.ndarray]:
        order = self.order(epoch, len(self.lengths))
        starts, used = [0], 0
        for i, length in enumerate(self.lengths[order].tolist()):
            if used + length > self.capacity or i - starts[-1] == self.max_units:
                starts.append(i)
                used = 0
            used += length
        return np.split(order, starts[1:])

    def report(self) -> dict[str, Any]:
        """Statistics of the first epoch."""
        rows, tokens = len(self.epoch(0)), int(self.lengths.sum())
        padding = rows * self.capacity - tokens
        return {
            "rows": rows,
            "documents": len(self.lengths),
            "tokens": tokens,
            "padding_tokens": padding,
            "padding_percent": 100 * padding / (tokens + padding),
        }


class PreferenceLoader:
    """Micro-batches of a mixture of preference sets. Stateless; safe to call from several threads."""

    def __init__(self, sets: Mapping[str, PreferenceSet], config: DataConfig, *, mismatched: bool = False) -> None:
        self.sets, self.config, self.mismatched = dict(sets), config, mismatched
        self.rows = {name: _rows(s, config, shuffled(config.seed, name)) for name, s in sets.items()}
        tokens = {name: int(s.lengths.sum()) for name, s in sets.items()}
        self.mixture = Mixture(config.mix, tokens, rows_per_step=config.micro_batches)

    def batch(self, step: int) -> tuple[PreferenceBatch, ...]:
        """The micro-batches of global step `step`."""
        if step < 0:
            raise ArgumentError(f"there is no step {step}", hint="steps start at 0")
        rows = []
        for source, number in self.mixture.rows(step):
            name = self.mixture.names[source]
            rows.append((self.sets[name], self.rows[name].row(number)))
        return batches_of(rows, self.config, mismatched=self.mismatched)

    def prefetch(self, start: int) -> Prefetch[tuple[PreferenceBatch, ...]]:
        return Prefetch(self.batch, start)

    def cursor(self, step: int) -> dict[str, Any]:
        """The position in every source at the start of `step`, as JSON: the next pair of each."""
        sources = {}
        for name, row in zip(self.mixture.names, self.mixture.counts(step), strict=True):
            place, found = self.rows[name].place(row), self.sets[name]
            first = found.units[self.rows[name].row(row)[0], 0]
            sources[name] = {
                "epoch": place.epoch,
                "row": place.row,
                "rows_before": row,
                "pair": found.store.document_id(first)[:-1],
            }
        return {"step": step, "seed": self.config.seed, "sources": sources}

    def rows_before(self, name: str, step: int) -> list[np.ndarray]:
        """The rows of a source in the steps before `step`, without those that only repeat units of the first epoch."""
        count = self.mixture.counts(step)[self.mixture.names.index(name)]
        return self.rows[name].epoch(0)[:count]

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Nothing to do: a step depends on its number only."""

    def report(self, steps: int) -> dict[str, Any]:
        """Statistics of one epoch of each source, and how much a run of `steps` steps reads from it."""
        sources = {name: rows.report() for name, rows in self.rows.items()}
        for name, used in zip(self.mixture.names, self.mixture.counts(steps), strict=True):
            place = self.rows[name].place(used)
            epochs = place.epoch + place.row / sources[name]["rows"]
            sources[name] |= {"rows_used": used, "epochs": epochs, "pairs_left_out": self.sets[name].left_out}
        return {"sources": sources, "steps": steps, "tokens": steps * self.config.tokens_per_step}


def evaluation_batches(
    found: PreferenceSet, config: DataConfig, *, limit: int | None = None, mismatched: bool = False
) -> Iterator[PreferenceBatch]:
    """One pass over a set, every unit once, at most `limit` batches, in a fixed shuffled order."""
    for units in evaluation_rows(found, config, limit=limit):
        yield from batches_of([(found, units)], config, mismatched=mismatched)


def evaluation_rows(found: PreferenceSet, config: DataConfig, *, limit: int | None = None) -> list[np.ndarray]:
    """The units of each batch of `evaluation_batches`."""
    return _rows(found, config, shuffled(config.seed, f"validation of {found.name}")).epoch(0)[:limit]


def _rows(found: PreferenceSet, config: DataConfig, order: Order) -> EpochRows:
    width = found.units.shape[1]
    return EpochRows(
        found.lengths,
        capacity=config.rows * config.context,
        max_units=max(max_sequences(config) // width, 1),
        order=order,
    )
