"""Masked-LM batches: BERT's 80/10/10 over exactly the asked share, reproducible, never without a target."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.data.loader import DataConfig, evaluation_batches
from bagu.data.masked import mask_batch
from bagu.data.store import TokenDocument, in_memory
from bagu.errors import BaguError
from bagu.types import IGNORE, Batch

VOCAB, MASK, SPECIAL = 200, 5, frozenset(range(6))
BYTES = np.arange(VOCAB) % 5


def batch_of(n: int, *, rows: int = 4, context: int = 64) -> Batch:
    """One document of n ordinary tokens between special ones; the rest of the batch is padding."""
    tokens = np.concatenate(([1], np.random.default_rng(n).integers(6, VOCAB, n), [2]))
    store = in_memory([TokenDocument(id="d", tokens=tokens)], token_bytes=BYTES)
    (batch,) = evaluation_batches(store, DataConfig(context=context, rows=rows))
    return batch


def masked(batch: Batch, *, key: tuple[int, ...] = (0, 1, 0), rate: float = 0.15) -> Batch:
    return mask_batch(batch, token_bytes=BYTES, mask_id=MASK, special_ids=SPECIAL, key=key, rate=rate)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 250), seed=st.integers(0, 5), rate=st.floats(0.001, 1.0))
def test_targets_are_the_original_tokens_at_the_chosen_places_only(n: int, seed: int, rate: float) -> None:
    batch = batch_of(n)
    out = masked(batch, key=(seed,), rate=rate)
    chosen = out.targets != IGNORE
    assert torch.equal(out.targets[chosen], batch.ids[chosen])
    assert torch.equal(out.ids[~chosen], batch.ids[~chosen])
    assert out.num_targets == int(chosen.sum()) == max(1, round(rate * n))
    assert out.target_bytes == int(BYTES[out.targets[chosen].numpy()].sum())
    assert not set(out.targets[chosen].tolist()) & SPECIAL  # special tokens and padding are never asked for
    assert not set(out.ids[chosen].tolist()) & (SPECIAL - {MASK})


def test_four_fifths_are_hidden_a_tenth_random_a_tenth_kept() -> None:
    batch = batch_of(60_000, rows=1000)
    out = masked(batch)
    chosen = out.targets != IGNORE
    hidden = (out.ids[chosen] == MASK).float().mean()
    kept = (out.ids[chosen] == out.targets[chosen]).float().mean()
    assert hidden == pytest.approx(0.8, abs=0.02)  # 9,000 draws: four standard deviations are 0.017
    assert kept == pytest.approx(0.1 + 0.1 / (VOCAB - 6), abs=0.014)
    random = out.ids[chosen & (out.ids != MASK) & (out.ids != batch.ids)]
    assert len(set(random.tolist())) > 0.9 * (VOCAB - 6)  # from all of the vocabulary


def test_a_key_hides_the_same_tokens_again_and_another_key_others() -> None:
    batch = batch_of(200)
    assert torch.equal(masked(batch).ids, masked(batch).ids)
    assert not torch.equal(masked(batch).targets, masked(batch, key=(0, 2, 0)).targets)
    assert torch.equal(batch.ids, batch_of(200).ids)  # the batch itself is not changed


def test_what_cannot_be_masked_is_refused() -> None:
    batch = batch_of(10)
    with pytest.raises(BaguError, match="rate of 0"):
        masked(batch, rate=0)
    with pytest.raises(BaguError, match="mask_id 200"):
        mask_batch(batch, token_bytes=BYTES, mask_id=200, special_ids=SPECIAL, key=(0,))
    with pytest.raises(BaguError, match="has padding"):
        mask_batch(batch, token_bytes=BYTES, mask_id=MASK, special_ids={1, 2}, key=(0,))
    with pytest.raises(BaguError, match="are special"):
        mask_batch(batch, token_bytes=BYTES, mask_id=MASK, special_ids=range(VOCAB), key=(0,))
