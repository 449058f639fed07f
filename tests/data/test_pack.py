"""Packing: every token exactly once per epoch, no document blocks the packer, and the report is right."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.data.bins import Bins, best_fit
from bagu.data.order import in_order, philox, shuffled
from bagu.data.pack import Layout, Piece
from bagu.data.token_stream import TokenStream
from bagu.errors import BaguError

LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=40).map(np.array)


def rows_of_epoch(layout: Layout) -> list[list[Piece]]:
    return [layout.row(n) for n in range(int(layout.rows_per_epoch))]


def tokens_of(rows: list[list[Piece]]) -> Counter[tuple[int, int]]:
    return Counter((p.document, t) for row in rows for p in row for t in range(p.start, p.end))


def every_token_once(lengths: np.ndarray, times: int = 1) -> dict[tuple[int, int], int]:
    return {(d, t): times for d, n in enumerate(lengths.tolist()) for t in range(n)}


@settings(max_examples=60)
@given(lengths=LENGTHS, context=st.integers(2, 40), cap=st.integers(2, 6), seed=st.integers(0, 3))
def test_a_stream_has_every_token_once_per_epoch_within_limits(
    lengths: np.ndarray, context: int, cap: int, seed: int
) -> None:
    layout = TokenStream(lengths, context=context, max_segments=cap, order=shuffled(seed, "x"))
    epochs = context  # after this many epochs the stream ends at a row boundary
    rows = [layout.row(n) for n in range(layout.epoch_tokens)]
    assert tokens_of(rows) == every_token_once(lengths, epochs)
    assert max(len(row) for row in rows) <= cap
    assert min(len(row) for row in rows) >= 1
    sizes = np.array([sum(p.end - p.start for p in row) for row in rows])
    assert sizes.max() <= context
    report = layout.report()
    assert context * len(rows) - sizes.sum() == report["padding_tokens"] * epochs
    assert report["padding_tokens"] == np.maximum(layout.slot - lengths, 0).sum()


def test_a_stream_without_tiny_documents_has_no_padding() -> None:
    lengths = np.random.default_rng(0).integers(20, 900, 300)
    layout = TokenStream(lengths, context=256, max_segments=16, order=shuffled(0, "x"))
    rows = [layout.row(n) for n in range(3 * int(layout.rows_per_epoch))]  # across two epoch boundaries
    assert {sum(p.end - p.start for p in row) for row in rows} == {256}


def test_a_split_document_continues_in_the_next_row() -> None:
    layout = TokenStream(np.array([5, 9, 2]), context=8, max_segments=None, order=in_order, epochs=1)
    assert layout.row(0) == [Piece(0, 0, 5), Piece(1, 0, 3)]
    assert layout.row(1) == [Piece(1, 3, 9), Piece(2, 0, 2)]
    assert layout.row(2) == []  # after the only epoch
    endless = TokenStream(np.array([5, 9, 2]), context=8, max_segments=None, order=in_order)
    assert endless.row(2) == endless.row(0)
    assert (endless.place(1), endless.place(2)) == ((0, 1), (1, 0))


@settings(max_examples=60)
@given(lengths=LENGTHS, context=st.integers(2, 40), cap=st.integers(1, 6), seed=st.integers(0, 3))
def test_bins_have_every_token_once_and_split_only_long_documents(
    lengths: np.ndarray, context: int, cap: int, seed: int
) -> None:
    layout = Bins(lengths, context=context, max_segments=cap, order=shuffled(seed, "x"))
    rows = rows_of_epoch(layout)
    assert tokens_of(rows) == every_token_once(lengths)
    assert max(len(row) for row in rows) <= cap
    assert all(sum(p.end - p.start for p in row) <= context for row in rows)
    pieces = Counter(p.document for row in rows for p in row)
    assert all(pieces[d] == -(-n // context) for d, n in enumerate(lengths.tolist()))
    second = [layout.row(len(rows) + n) for n in range(len(rows))]
    assert sorted(second) == sorted(rows)  # the next epoch: the same rows
    report = layout.report()
    assert report["tokens_lost"] == 0
    assert report["padding_tokens"] == len(rows) * context - lengths.sum()


def test_long_documents_do_not_block_the_packer() -> None:
    """nanochat's packer keeps a chat longer than the row in its buffer forever; with 40 % of them, row 98 is
    the first that is only padding."""
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(800) < 0.4, rng.integers(514, 3000, 800), rng.integers(20, 513, 800))
    layout = Bins(lengths, context=512, max_segments=32, order=shuffled(0, "chats"))
    rows = rows_of_epoch(layout)
    assert min(len(row) for row in rows) >= 1
    assert layout.report()["tokens_lost"] == 0
    assert layout.report()["padding_percent"] < 2
    assert tokens_of(rows) == every_token_once(lengths)


def test_best_fit_takes_the_row_with_the_least_sufficient_space() -> None:
    assert best_fit([7, 5, 3, 2, 2], capacity=10, max_pieces=9).tolist() == [0, 1, 0, 1, 1]
    assert best_fit([3, 3, 3], capacity=10, max_pieces=2).tolist() == [0, 0, 1]
    assert best_fit([], capacity=10, max_pieces=2).tolist() == []


def test_rows_without_targets_are_skipped_and_counted() -> None:
    lengths = np.array([8, 8, 8])
    layout = Bins(lengths, context=8, max_segments=2, order=in_order, useful=lambda documents, s, e: documents != 1)
    assert rows_of_epoch(layout) == [[Piece(0, 0, 8)], [Piece(2, 0, 8)]]
    assert layout.report()["rows_without_targets"] == 1


def test_orders_are_permutations_that_change_with_seed_name_and_epoch() -> None:
    orders = [shuffled(s, n)(e, 1000).tolist() for s in (0, 1) for n in ("a", "b") for e in (0, 1)]
    assert all(sorted(order) == list(range(1000)) for order in orders)
    assert len({tuple(order) for order in orders}) == len(orders)
    # the data of a run must not depend on the machine or NumPy's version: these are the expected bits
    assert philox(0, "a", 0).random_raw(2).tolist() == [10691413092683692756, 15894054778473927551]


def test_a_stream_needs_two_segments_per_row() -> None:
    with pytest.raises(BaguError, match="max_segments_per_row is 1"):
        TokenStream(np.array([4]), context=8, max_segments=1, order=in_order)
