"""The loader: token stores to the batches of a run.

Global step s is a function of (seed, s) and the content of the stores only. It does not depend on earlier calls, the
process, or the number of ranks. To resume is to call with another step, and the cursor only describes where a step
starts; there is no state to restore.

    mixture   row j of step s  ->  source, and its n-th row      (mix.py)
    layout    n-th row         ->  pieces of documents           (pack.py)
    store     pieces           ->  tokens, targets, segments     (batch.py)
    mapped    batch            ->  the batch of an objective, e.g. with masked tokens (masked.py)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, get_args

import numpy as np

from bagu.data.batch import assemble
from bagu.data.bins import Bins
from bagu.data.mix import MixConfig, Mixture
from bagu.data.order import Order, in_order, shuffled
from bagu.data.pack import Layout, Packing
from bagu.data.prefetch import Prefetch
from bagu.data.store import TokenStore
from bagu.data.token_stream import TokenStream
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.types import Batch


class Transform(Protocol):
    """Makes another batch of one. `place` names the batch (step and micro-batch): the same place, the same result."""

    def __call__(self, batch: Batch, *place: str | int) -> Batch: ...


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The shape of a step and its packing: `micro_batches` of `rows` rows of `context` tokens."""

    context: int
    rows: int
    micro_batches: int = 1
    seed: int = 0
    # stream: no padding, documents are split at the end of a row. whole: a document that fits in a row is not split.
    # joined: like stream, but documents in a row attend to each other, as in most older trainers
    packing: Packing = "stream"
    max_segments_per_row: int | None = None  # pieces of documents in a row; None: context / 16, at least 2
    mix: MixConfig = field(default_factory=MixConfig)

    def __post_init__(self) -> None:
        if self.context < 2:
            raise ArgumentError(f"a context of {self.context} tokens has no targets", hint="give 2 or more")
        for name in ("rows", "micro_batches"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}", hint="give 1 or more")
        UnknownName.check("packing", self.packing, get_args(Packing))
        if not 0 <= self.seed < 2**63:
            raise ArgumentError(f"seed is {self.seed}", hint="give a number from 0 to 2^63 - 1")
        least = 2 if self.packing == "stream" else 1
        if self.max_segments_per_row is not None and self.max_segments_per_row < least:
            hint = f"give {least} or more with packing={self.packing!r}"
            raise ArgumentError(f"max_segments_per_row is {self.max_segments_per_row}", hint=hint)
        if self.max_segments_per_row is not None and self.packing == "joined":
            hint = "remove it, or choose another packing"
            raise ArgumentError("max_segments_per_row has no effect with packing='joined'", hint=hint)

    @property
    def max_segments(self) -> int:
        """Maximum number of pieces in a row."""
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
    """Batches of a mixture of token stores. Stateless; safe to call from several threads."""

    def __init__(self, stores: Mapping[str, TokenStore], config: DataConfig) -> None:
        if not stores:
            raise ArgumentError("the loader has no token store", hint="build one from a source")
        first = next(iter(stores.values()))
        for name, store in stores.items():
            if not np.array_equal(store.token_bytes, first.token_bytes):
                hint = "build every store of a mixture with the same tokenizer"
                raise BaguError(f"the stores {name!r} and {next(iter(stores))!r} have different tokenizers", hint=hint)
        self.config = config
        self.stores = dict(stores)
        self.layouts = {
            name: layout(store, config, shuffled(config.seed, name), name) for name, store in stores.items()
        }
        tokens = {name: store.num_tokens for name, store in stores.items()}
        self.mixture = Mixture(config.mix, tokens, rows_per_step=config.rows_per_step)
        self.transform: Transform | None = None

    def mapped(self, transform: Transform) -> Loader:
        """A copy of this loader whose batches are `transform(batch, step, index of the micro-batch)`."""
        other = copy.copy(self)
        other.transform = transform
        return other

    def batch(self, step: int) -> tuple[Batch, ...]:
        """The micro-batches of global step `step`."""
        batches = self._assembled(step, range(self.config.micro_batches))
        if not any(b.num_targets for b in batches.values()):
            hint = "raise rows or context, or set packing='whole', which skips rows without targets"
            raise BaguError(f"step {step} has no targets: the loss mask is 0 in all of its rows", hint=hint)
        return tuple(self._transformed(step, batches).values())

    def share(self, step: int, numbers: Sequence[int]) -> dict[int, Batch]:
        """The micro-batches of global step `step` with these numbers. They may have no targets."""
        return self._transformed(step, self._assembled(step, numbers))

    def _transformed(self, step: int, batches: dict[int, Batch]) -> dict[int, Batch]:
        if self.transform is None:
            return batches
        return {number: self.transform(b, step, number) for number, b in batches.items()}

    def _assembled(self, step: int, numbers: Sequence[int]) -> dict[int, Batch]:
        if step < 0:
            raise ArgumentError(f"there is no step {step}", hint="steps start at 0")
        c, made = self.config, dict[int, Batch]()
        rows = [(self.mixture.names[source], number) for source, number in self.mixture.rows(step)]
        for at in numbers:
            pieces = [
                (self.stores[name], self.layouts[name].row(n)) for name, n in rows[at * c.rows : (at + 1) * c.rows]
            ]
            joined = c.packing == "joined"
            made[at] = assemble(pieces, context=c.context, max_segments=c.max_segments, joined=joined)
        return made

    def cursor(self, step: int) -> dict[str, Any]:
        """The position in every source at the start of `step`, as JSON: the next token of each."""
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
                "order": [self.config.seed, name, place.epoch],  # the key of this epoch's shuffle
            }
        return {"step": step, "seed": self.config.seed, "sources": sources}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Nothing to do: a step is a function of its number."""

    def report(self, steps: int | None = None) -> dict[str, Any]:
        """Statistics of one epoch of each source, and with `steps` how much a run of this many steps reads from it."""
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
        """An iterator over the batches of steps `start`, `start` + 1, ... A thread makes up to `depth` in advance."""
        return Prefetch(self.batch, start, stop=stop, depth=depth)

    def prefetch_share(self, start: int, numbers: Sequence[int], *, depth: int = 2) -> Prefetch[dict[int, Batch]]:
        """The same for some of the micro-batches of each step: see `share`."""
        return Prefetch(lambda step: self.share(step, numbers), start, depth=depth)


def layout(store: TokenStore, config: DataConfig, order: Order, name: str, *, epochs: int | None = None) -> Layout:
    """The rows of one store."""
    lengths = store.lengths
    documents = np.arange(len(lengths))
    if not _num_targets(store, documents, np.zeros_like(documents), lengths).any():
        masked = store.loss_mask is not None
        hint = "check the chat template: it marks the assistant's tokens" if masked else "check the source"
        raise BaguError(f"the store {name!r} has {len(lengths)} documents and no targets", hint=hint)
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
    return TokenStream(
        lengths, context=config.context, max_segments=max_segments, order=order, spread=spread, epochs=epochs
    )


def _num_targets(store: TokenStore, documents: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Number of targets in each piece: tokens start + 1 to end, at most the last token of the document."""
    first = store.offsets[documents]
    lows = first + starts + 1
    highs = np.minimum(first + ends + 1, store.offsets[documents + 1])
    if store.loss_mask is None:
        return highs - lows
    before = np.concatenate(([0], np.cumsum(store.loss_mask, dtype=np.int64)))
    return before[highs] - before[lows]


def evaluation_batches(store: TokenStore, config: DataConfig, *, limit: int | None = None) -> Iterator[Batch]:
    """One pass over a store, every target once, the same each time. Batches are as in training; the last one is padded.

    At most `limit` batches. `config` gives the shape and the packing. Documents are in the order of the store; whole
    ones, which `Bins` packs longest first, in a shuffled order of rows, so that the first batches are a fair sample.
    """
    order = shuffled(config.seed, "evaluation") if config.packing == "whole" else in_order
    rows = layout(store, config, order, "evaluation", epochs=1)
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
        if batch.num_targets:  # skip a batch that holds only user turns: it has no loss
            made += 1
            yield batch


def check_vocab(store: TokenStore, vocab_size: int) -> None:
    """Raise if a store has token ids that a model of `vocab_size` does not have."""
    if store.vocab_size <= vocab_size:
        return  # `store` checked the ids against its tokenizer's vocabulary
    chunk = 1 << 22
    largest = max(int(store.flat[i : i + chunk].max()) for i in range(0, store.num_tokens, chunk))
    if largest >= vocab_size:
        raise BaguError(
            f"the tokenizer does not match the model: the data has token id {largest}, the model's largest id is "
            f"{vocab_size - 1}",
            hint=f"use the model's own tokenizer, or a model with vocab_size={store.vocab_size}",
        )
