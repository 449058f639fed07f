"""Which rows a model is tested on: later ones, other batches, or any.

Rows of one batch are alike, and tomorrow is not yesterday: a random split lets a model look up the answer. Forward in
time is the default where there is a time, whole batches where there are groups; the random score stands beside them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bagu.process.schema import Schema
from bagu.process.table import Table

FOLDS = 5
# Folds of fewer than FEW rows, where they weigh the models: with five, models are fitted to 4/5 of the rows, and some
# lose much more by that than others (on 42 of 53 rows a quadratic of 15 terms loses most, journal 018).
MORE_FOLDS, FEW = 20, 200


@dataclass(frozen=True)
class Split:
    """Pairs of training rows and test rows."""

    name: str  # forward, group or random
    folds: tuple[tuple[np.ndarray, np.ndarray], ...]

    @property
    def tested(self) -> np.ndarray:
        return np.concatenate([test for _, test in self.folds])


@dataclass(frozen=True)
class Splits:
    """`honest` judges and weighs the models, `calibrate` sets the intervals, `plain` is for comparison."""

    honest: Split
    calibrate: Split
    plain: Split


def make_splits(table: Table, schema: Schema) -> Splits:
    rows = table.rows
    groups, stamps = schema.of("group"), schema.of("time")
    labels = np.unique(table[groups[0].name].values, return_inverse=True)[1] if groups else np.arange(rows)
    forward = None
    if stamps and np.isfinite(table[stamps[0].name].values).all():
        forward = _forward(table[stamps[0].name].values, labels)
    folds = MORE_FOLDS if rows < FEW and forward is None else FOLDS
    grouped = bool(groups) and len(np.unique(labels)) >= FOLDS
    calibrate = plain = Split("random", _by_key(np.arange(rows), FOLDS if grouped else folds))
    if grouped:
        calibrate = Split("group", _by_key(labels, folds))
    return Splits(forward or calibrate, calibrate, plain)


def _by_key(labels: np.ndarray, folds: int) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    """Folds of whole labels, shuffled: files of experiments are ordered."""
    names = np.unique(labels)
    part = np.empty(len(names), int)
    part[np.random.default_rng(0).permutation(len(names))] = np.arange(len(names)) % folds
    fold = part[np.searchsorted(names, labels)]
    rows = np.arange(len(labels))
    return tuple((rows[fold != k], rows[fold == k]) for k in range(folds) if (fold == k).any() and (fold != k).any())


def _forward(stamps: np.ndarray, labels: np.ndarray) -> Split | None:
    """Blocks of time, each tested by a model of all before it; a batch belongs to the block of its first row."""
    _, first = np.unique(labels, return_inverse=True)
    start = np.full(first.max() + 1, np.inf)
    np.minimum.at(start, first, stamps)
    rank = np.argsort(np.argsort(start[first], kind="stable"), kind="stable")
    block = np.minimum(rank * (FOLDS + 1) // len(rank), FOLDS)
    for label in np.unique(first):  # whole batches
        block[first == label] = block[first == label].min()
    rows = np.arange(len(stamps))
    folds = [(rows[block < k], rows[block == k]) for k in range(2, FOLDS + 1)]
    folds = [(train, test) for train, test in folds if len(train) >= 10 and len(test) >= 2]
    return Split("forward", tuple(folds)) if len(folds) >= 2 else None
