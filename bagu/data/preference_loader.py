"""Batches of preferences: whole pairs, packed. Both sides of a pair are in one micro-batch.

A micro-batch has `rows * context` tokens, as in the loader of texts. It takes the pairs of an epoch in shuffled order
while they fit, so the number of pairs in a step varies and the loss divides by it. Step s is a function of (seed, s)
and the data only. A sequence longer than `context`, or a pair longer than a micro-batch, is left out and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from bagu.data.loader import DataConfig
from bagu.data.mix import Mixture
from bagu.data.order import Order, shuffled
from bagu.data.pack import Place
from bagu.data.prefetch import Prefetch
from bagu.data.sequences import Tokens, pack
from bagu.data.store import TokenStore
from bagu.errors import ArgumentError, BaguError
from bagu.types import Batch

__all__ = [
    "PreferenceBatch", "PreferenceLoader", "PreferenceSet", "batches_of", "evaluation_batches", "evaluation_rows",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferenceBatch:
    """Sequences of prompt and answer. For pairs, sequence 2i is chosen over sequence 2i + 1.

    `mismatched` has the prompts of the same sequences with the answers of others (for the KL term of KTO).
    """

    batch: Batch
    num_sequences: int
    num_chosen: int
    chosen: torch.Tensor  # [S] bool: the answer is a chosen or good one
    lengths: torch.Tensor  # [S] fp32: tokens of the answer
    reference: torch.Tensor | None = None  # [S] fp32: log-probability of the answer under the reference, if cached
    mismatched: Batch | None = None

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens + (0 if self.mismatched is None else self.mismatched.num_tokens)

    @property
    def num_padding(self) -> int:
        return self.batch.num_padding + (0 if self.mismatched is None else self.mismatched.num_padding)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> PreferenceBatch:
        names = ("batch", "chosen", "lengths", "reference", "mismatched")
        moved = {n: t.to(device, non_blocking=non_blocking) for n in names if (t := getattr(self, n)) is not None}
        return replace(self, **moved)


@dataclass(frozen=True, kw_only=True, eq=False)
class PreferenceSet:
    """The preferences of a store that fit: `units[i]` are the documents of one pair, or one document for KTO."""

    name: str
    store: TokenStore
    units: np.ndarray  # [N, 2] or [N, 1] int64
    lengths: np.ndarray  # [N] int64: tokens of a unit
    left_out: int
    reference: np.ndarray | None = None  # [documents] fp32: log-probabilities under the reference; NaN: not computed

    @classmethod
    def of(cls, name: str, store: TokenStore, config: DataConfig, *, paired: bool) -> PreferenceSet:
        documents = np.arange(store.num_documents)
        if paired:
            _check_pairs(name, store)
        units = documents.reshape(-1, 2 if paired else 1)
        sizes = store.lengths[units]
        fits = (sizes.max(1) <= config.context) & (sizes.sum(1) <= config.rows * config.context)
        if not fits.any():
            what = "pairs" if paired else "answers"
            raise BaguError(
                f"none of the {len(units):,} {what} of source {name!r} fits in data.context = {config.context} tokens"
                f" and a micro-batch of {config.rows * config.context}: the shortest has {sizes.max(1).min()} tokens"
                f" on its longer side",
                hint="raise data.context (up to the model's positions) or data.rows, or give shorter texts",
            )
        return cls(
            name=name, store=store, units=units[fits], lengths=sizes.sum(1)[fits], left_out=int((~fits).sum())
        )  # fmt: skip

    def tokens(self, document: int) -> Tokens:
        mask = self.store.mask(document)
        assert mask is not None
        return Tokens(ids=tuple(self.store.tokens(document).tolist()), start=len(mask) - int(mask.sum(dtype=np.int64)))

    def is_chosen(self, document: int) -> bool:
        return self.store.document_id(document).endswith("+")

    @property
    def num_targets(self) -> int:
        """Tokens of answers in the units that fit."""
        mask = self.store.loss_mask
        assert mask is not None
        sums = np.add.reduceat(mask.astype(np.int64), self.store.offsets[:-1])
        return int(sums[self.units].sum())


def _check_pairs(name: str, store: TokenStore) -> None:
    ids = [store.document_id(i) for i in range(store.num_documents)]
    alone = next((a for a, b in zip(ids[::2], [*ids[1::2], ""], strict=False) if a[:-1] != b[:-1]), None)
    if alone is not None:
        raise BaguError(
            f"{alone[:-1]} of source {name!r} has one answer, and this objective compares two",
            hint="give chosen and rejected answers; completions with labels are for objective.variant=kto",
        )


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
            "rows": rows, "documents": len(self.lengths), "tokens": tokens, "padding_tokens": padding,
            "padding_percent": 100 * padding / (tokens + padding),
        }  # fmt: skip


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
                "epoch": place.epoch, "row": place.row, "rows_before": row, "pair": found.store.document_id(first)[:-1],
            }  # fmt: skip
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
        found.lengths, capacity=config.rows * config.context, max_units=max(_max_sequences(config) // width, 1),
        order=order,
    )  # fmt: skip


def _max_sequences(config: DataConfig) -> int:
    return max(config.rows * config.max_segments, 2)


def batches_of(
    rows: Sequence[tuple[PreferenceSet, np.ndarray]], config: DataConfig, *, mismatched: bool = False
) -> tuple[PreferenceBatch, ...]:
    """A micro-batch of each row of units. The mismatched answer of a sequence is that of the next one in the step."""
    documents = [[(found, int(d)) for d in found.units[units].ravel()] for found, units in rows]
    sequences = [[found.tokens(d) for found, d in row] for row in documents]
    flat = [s for row in sequences for s in row]
    others = iter([*flat[1:], flat[0]])
    batches = []
    for row, tokens in zip(documents, sequences, strict=True):
        swapped = [_answered(s, next(others), config.context) for s in tokens] if mismatched else None
        batches.append(_batch(row, tokens, swapped, config))
    return tuple(batches)


def _batch(
    row: Sequence[tuple[PreferenceSet, int]],
    sequences: Sequence[Tokens],
    swapped: Sequence[Tokens] | None,
    config: DataConfig,
) -> PreferenceBatch:
    reference = None
    if all(found.reference is not None for found, _ in row):
        known = [found.reference[d] for found, d in row if found.reference is not None]
        reference = torch.from_numpy(np.array(known, np.float32))
        if reference.isnan().any():
            raise BaguError(
                "the run needs pairs whose reference log-probabilities were not computed: too many steps were refused",
                hint="set objective.reference=live",
            )
    other = None
    if swapped is not None:  # without gradients, so its shape may vary
        size = -(-sum(len(s.ids) for s in swapped) // 64) * 64
        other = pack(swapped, tokens=size, max_segments=len(swapped), context=config.context)
    return PreferenceBatch(
        batch=pack(
            sequences, tokens=config.rows * config.context, max_segments=_max_sequences(config), context=config.context
        ),
        num_sequences=len(sequences),
        num_chosen=sum(found.is_chosen(d) for found, d in row),
        chosen=torch.tensor([found.is_chosen(d) for found, d in row]),
        lengths=torch.tensor([float(s.num_targets) for s in sequences]),
        reference=reference,
        mismatched=other,
    )


def _answered(prompt: Tokens, answer: Tokens, context: int) -> Tokens:
    """The prompt of one sequence with the answer of another, cut to the context."""
    ids = prompt.ids[: prompt.start] + answer.ids[answer.start :]
    return Tokens(ids=ids[:context], start=prompt.start)
