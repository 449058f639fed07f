"""Packing whole sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagu.data.sequences import Tokens, micro_batches, pack
from bagu.errors import ArgumentError
from bagu.types import IGNORE


def test_a_sequence_is_one_segment_with_targets_from_its_start() -> None:
    batch = pack([Tokens(ids=(5, 6, 7), start=1), Tokens(ids=(8, 9), start=1)], tokens=8, max_segments=3)
    assert batch.ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert batch.targets.tolist() == [6, 7, IGNORE, 9, IGNORE, IGNORE, IGNORE, IGNORE]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8, 8]
    assert (batch.max_len, batch.num_targets, batch.num_padding) == (3, 3, 3)


def test_a_full_batch_has_no_padding() -> None:
    batch = pack([Tokens(ids=(5, 6, 7), start=2)], tokens=3, max_segments=1)
    assert batch.cu_seqlens.tolist() == [0, 3, 3] and batch.num_padding == 0
    assert batch.targets.tolist() == [IGNORE, 7, IGNORE] and batch.cu_seqlens.dtype == torch.int32


def test_padding_is_split_into_segments_that_a_model_has_positions_for() -> None:
    sequences = [Tokens(ids=(5, 6, 7), start=1)]
    batch = pack(sequences, tokens=12, max_segments=2, context=4)
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 11, 12, 12] and batch.max_len == 4
    assert int(batch.positions.max()) == 3
    full = pack([Tokens(ids=(1, 2, 3, 4), start=1)] * 3, tokens=12, max_segments=3, context=4)
    assert full.cu_seqlens.tolist() == [0, 4, 8, 12, 12, 12, 12]
    assert pack(sequences, tokens=12, max_segments=3, context=4).cu_seqlens.shape == full.cu_seqlens.shape
    with pytest.raises(ArgumentError, match="a sequence has 3 tokens; context is 2"):
        pack(sequences, tokens=12, max_segments=2, context=2)


@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_is_in_one_micro_batch_that_it_fits_in(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 40, 60).tolist()
    batches = micro_batches(lengths, capacity=64)
    assert sorted(i for batch in batches for i in batch) == list(range(60))
    assert all(sum(lengths[i] for i in batch) <= 64 for batch in batches)
    # First fit uses at most 1.7 times the bins of an optimal packing, plus one.
    assert len(batches) <= 1.7 * np.ceil(sum(lengths) / 64) + 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a sequence has 9 tokens, and a micro-batch 8"):
        micro_batches([3, 9], capacity=8)
    with pytest.raises(ArgumentError, match="do not fit"):
        pack([Tokens(ids=(1, 2, 3), start=1)], tokens=2, max_segments=1)
    with pytest.raises(ArgumentError, match="do not fit"):
        pack([Tokens(ids=(1, 2), start=1)] * 2, tokens=8, max_segments=1)
    with pytest.raises(ArgumentError, match="at least one token each"):
        Tokens(ids=(1, 2), start=2)
