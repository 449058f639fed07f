"""The loader: token stores to the batches of a run.

Global step s is a function of (seed, s) and of what the stores hold, of nothing else: not of the calls before it, the
process, or the number of ranks. So a resume is a call with another number, and the cursor is a description of where a
step begins, not a state.

    mixture   row j of step s  ->  source, and its n-th row      (mix.py)
    layout    n-th row         ->  pieces of documents           (pack.py)
    store     pieces           ->  tokens, targets, segments     (batch.py)
    mapped    batch            ->  what an objective makes of it, such as one with hidden tokens (masked.py)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np

from bagu.data.batch import assemble
from bagu.data.mix import MixConfig, Mixture
from bagu.data.pack import Bins, Layout, Order, Packing, Tape, in_order, shuffled
from bagu.data.prefetch import Prefetch
from bagu.data.store import TokenStore
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.types import Batch

__all__ = ["DataConfig", "Loader", "Transform", "check_vocab", "evaluation_batches"]


class Transform(Protocol):
    """Makes another batch of one. `place` names the batch (step and micro-batch): the same place, the same result."""

    def __call__(self, batch: Batch, *place: str | int) -> Batch: ...


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The shape of a step and how it is filled: `micro_batches` of `rows` rows of `context` tokens."""

    context: int
    rows: int
    micro_batches: int = 1
    seed: int = 0
    # stream: no padding, documents are cut where a row ends. whole: a document that fits a row is not cut.
    # joined: as stream, but documents in a row see each other, as most older trainers have it
    packing: Packing = "stream"
    max_segments_per_row: int | None = None  # pieces of documents in a row; None: context / 16, and at least 2
    mix: MixConfig = field(default_factory=MixConfig)

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ArgumentError(f"a context of {self.context} tokens has nothing to predict", hint="give 2 or more")
        for name in ("rows", "micro_batches"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}", hint="give 1 or more")
        if self.packing not in get_args(Packing):
            raise UnknownName.among("packing", self.packing, get_args(Packing))
        if not 0 <= self.seed < 2**63:
            raise ArgumentError(f"seed is {self.seed}", hint="give a number from 0 to 2^63 - 1")
        least = 2 if self.packing == "stream" else 1
        if self.max_segments_per_row is not None and self.max_segments_per_row < least:
            hint = f"give {least} or more with packing={self.packing!r}"
            raise ArgumentError(f"max_segments_per_row is {self.max_segments_per_row}", hint=hint)
        if self.max_segments_per_row is not None and self.packing == "joined":
            hint = "remove it, or choose another packing"
            raise ArgumentError("max_segments_per_row means nothing with packing='joined'", hint=hint)

    @property
    def max_segments(self) -> int:
        """Pieces in a row at most."""
        if self.packing == "joined":
            return self.context
        return self.max_segments_per_row or max(2, self.context // 16)

    @property
    def rows_per_step(self) -> int:
        return self.rows * self.micro_batches

    @property
    def tokens_per_step(self) -> int:
        return self.rows_per_step * self.context


class Loader:
    """Batches of a mixture of token stores. Holds no position; safe to call from several threads."""

    def __init__(self, stores: Mapping[str, TokenStore], config: DataConfig) -> None:
        if not stores:
            raise ArgumentError("a loader was given no token store", hint="build one from a source")
        first = next(iter(stores.values()))
        for name, store in stores.items():
            if not np.array_equal(store.token_bytes, first.token_bytes):
                hint = "build every store of a mixture with the same tokenizer"
                raise BaguError(
                    f"the store {name!r} was made with another tokenizer than {next(iter(stores))!r}", hint=hint
                )
        self.config = config
        self.stores = dict(stores)
        self.layouts = {
            name: layout(store, config, shuffled(config.seed, name), name) for name, store in stores.items()
        }
        tokens = {name: store.num_tokens for name, store in stores.items()}
        self.mixture = Mixture(config.mix, tokens, rows_per_step=config.rows_per_step)
        self.transform: Transform | None = None

    def mapped(self, transform: Transform) -> Loader:
        """The same loader whose batches are `transform(batch, step, number of the micro-batch)`."""
        other = copy.copy(self)
        other.transform = transform
        return other

    def batch(self, step: int) -> tuple[Batch, ...]:
        """The micro-batches of global step `step`."""
        if step < 0:
            raise ArgumentError(f"there is no step {step}", hint="steps are counted from 0")
        c = self.config
        rows = []
        for source, number in self.mixture.rows(step):
            name = self.mixture.names[source]
            rows.append((self.stores[name], self.layouts[name].row(number)))
        cuts = range(0, len(rows), c.rows)
        joined = c.packing == "joined"
        batches = tuple(
            assemble(rows[i : i + c.rows], context=c.context, max_segments=c.max_segments, joined=joined) for i in cuts
        )
        if not any(b.num_targets for b in batches):
            hint = "raise rows or context, or set packing='whole', which leaves out rows without targets"
            raise BaguError(
                f"step {step} has no target to learn from: the loss mask is 0 in all of its rows", hint=hint
            )
        if self.transform is None:
            return batches
        return tuple(self.transform(b, step, number) for number, b in enumerate(batches))

    def cursor(self, step: int) -> dict[str, Any]:
        """Where `step` begins in every source, as JSON: the next token each will give."""
        sources = {}
        for name, row in zip(self.mixture.names, self.mixture.counts(step), strict=True):
            layout = self.layouts[name]
            place, pieces = layout.place(row), layout.row(row)
            sources[name] = {
                "epoch": place.epoch,
                "row": place.row,
                "rows_before": row,
                "document": self.stores[name].document_id(pieces[0].document),
                "offset": pieces[0].start,
                "order": [self.config.seed, name, place.epoch],  # what keys the shuffle of this epoch
            }
        return {"step": step, "seed": self.config.seed, "sources": sources}

    def report(self, steps: int | None = None) -> dict[str, Any]:
        """One epoch of each source in numbers, and with `steps` what a run of so many steps takes from it."""
        sources = {name: dict(layout.report()) for name, layout in self.layouts.items()}
        report: dict[str, Any] = {"packing": self.config.packing, "sources": sources}
        if steps is None:
            return report
        total = steps * self.config.rows_per_step
        ideal = self.mixture.ideal(np.array([steps]))[0].tolist()
        for name, rows, wanted in zip(self.mixture.names, self.mixture.counts(steps), ideal, strict=True):
            sources[name] |= {
                "rows_used": rows,
                "epochs": rows / self.layouts[name].rows_per_epoch,
                "mix_percent": 100 * rows / total,
                "mix_ideal_percent": 100 * wanted / total,
            }
        padding = sum(s["padding_percent"] * s["rows_used"] for s in sources.values()) / total
        tokens = total * self.config.context
        return report | {"steps": steps, "tokens": tokens, "padding_percent": padding}

    def prefetch(self, start: int, *, stop: int | None = None, depth: int = 2) -> Prefetch[tuple[Batch, ...]]:
        """The batches of steps `start`, `start` + 1, ... made ahead by a thread, `depth` steps at most."""
        return Prefetch(self.batch, start, stop=stop, depth=depth)


def layout(store: TokenStore, config: DataConfig, order: Order, name: str, *, epochs: int | None = None) -> Layout:
    """The rows of one store."""
    lengths = store.lengths
    documents = np.arange(len(lengths))
    if not _num_targets(store, documents, np.zeros_like(documents), lengths).any():
        masked = store.loss_mask is not None
        hint = (
            "look at the chat template: it decides which tokens are the assistant's" if masked else "look at the source"
        )
        raise BaguError(f"the store {name!r} has {len(lengths)} documents and not one target to learn from", hint=hint)
    if config.packing == "whole":
        return Bins(
            lengths,
            context=config.context,
            max_segments=config.max_segments,
            order=order,
            useful=lambda documents, starts, ends: _num_targets(store, documents, starts, ends) > 0,
        )
    max_segments = config.max_segments if config.packing == "stream" else None
    spread = None if order is in_order else shuffled(config.seed, f"rows of {name}")
    return Tape(lengths, context=config.context, max_segments=max_segments, order=order, spread=spread, epochs=epochs)


def _num_targets(store: TokenStore, documents: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Targets that count in each piece: those of tokens start + 1 to end, which may be the document's last."""
    first = store.offsets[documents]
    lows = first + starts + 1
    highs = np.minimum(first + ends + 1, store.offsets[documents + 1])
    if store.loss_mask is None:
        return highs - lows
    before = np.concatenate(([0], np.cumsum(store.loss_mask, dtype=np.int64)))
    return before[highs] - before[lows]


def evaluation_batches(store: TokenStore, config: DataConfig, *, limit: int | None = None) -> Iterator[Batch]:
    """One pass over a store in its own order, every target once: batches as training has them, the last one padded.

    `limit` ends it after so many batches. Of `config` the shape and the packing count; nothing is shuffled.
    """
    rows = layout(store, config, in_order, "evaluation", epochs=1)
    total = int(np.ceil(rows.rows_per_epoch))
    made = 0
    for start in range(0, total, config.rows):
        if made == limit:
            return
        numbers = range(start, start + config.rows)
        batch = assemble(
            [(store, rows.row(n) if n < total else []) for n in numbers],
            context=config.context,
            max_segments=config.max_segments,
            joined=config.packing == "joined",
        )
        if batch.num_targets:  # else it holds chat turns that do not count, and has no loss
            made += 1
            yield batch


def check_vocab(store: TokenStore, vocab_size: int) -> None:
    """Refuse a store with token ids that a model of `vocab_size` does not have."""
    if store.vocab_size <= vocab_size:
        return  # the store was checked against its tokenizer's vocabulary when it was made
    chunk = 1 << 22
    largest = max(int(store.flat[i : i + chunk].max()) for i in range(0, store.num_tokens, chunk))
    if largest >= vocab_size:
        raise BaguError(
            f"the tokenizer does not match the model: the data has token id {largest}, the model's vocabulary ends at "
            f"{vocab_size - 1}",
            hint=f"use the tokenizer the model was made with, or a model with vocab_size={store.vocab_size}",
        )
