"""Masked-LM batches: BERT's 80/10/10, exactly the given rate, reproducible, at least one target."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.data.loader import DataConfig, Loader, evaluation_batches
from bagu.data.masked import Masking, mask_batch
from bagu.data.store import TokenDocument
from bagu.data.store_writer import in_memory
from bagu.errors import BaguError
from bagu.types import IGNORE, Batch

VOCAB, MASK, SPECIAL = 200, 5, frozenset(range(6))
BYTES = np.arange(VOCAB) % 5


def masking(*, seed: int = 0, rate: float = 0.15, mask_id: int = MASK, special: frozenset[int] = SPECIAL) -> Masking:
    return Masking(seed=seed, rate=rate, vocab_size=VOCAB, mask_id=mask_id, special_ids=special)


def batch_of(n: int, *, rows: int = 4, context: int = 64, least: int = 6) -> Batch:
    """One document of n tokens from `least` on between special ones; the rest of the batch is padding."""
    tokens = np.concatenate(([1], np.random.default_rng(n).integers(least, VOCAB, n), [2]))
    store = in_memory([TokenDocument(id="d", tokens=tokens)], token_bytes=BYTES)
    (batch,) = evaluation_batches(store, DataConfig(context=context, rows=rows))
    return batch


def masked(batch: Batch, *place: int, seed: int = 0, rate: float = 0.15) -> Batch:
    return mask_batch(batch, masking(seed=seed, rate=rate), *place)


@settings(max_examples=40)
@given(n=st.integers(1, 250), seed=st.integers(0, 5), rate=st.floats(0.001, 1.0))
def test_targets_are_the_original_tokens_at_the_chosen_positions(n: int, seed: int, rate: float) -> None:
    batch = batch_of(n)
    out = masked(batch, seed=seed, rate=rate)
    chosen = out.targets != IGNORE
    assert torch.equal(out.targets[chosen], batch.ids[chosen])
    assert torch.equal(out.ids[~chosen], batch.ids[~chosen])
    assert out.num_targets == int(chosen.sum()) == max(1, round(rate * n))
    assert out.target_bytes == 0  # no bits per byte for masked tokens
    assert not set(out.targets[chosen].tolist()) & SPECIAL  # special tokens and padding are never targets
    assert not set(out.ids[chosen].tolist()) & (SPECIAL - {MASK})


def test_80_percent_masked_10_random_10_kept() -> None:
    batch = batch_of(60_000, rows=1000)
    out = masked(batch)
    chosen = out.targets != IGNORE
    hidden = (out.ids[chosen] == MASK).float().mean()
    kept = (out.ids[chosen] == out.targets[chosen]).float().mean()
    assert hidden == pytest.approx(0.8, abs=0.02)  # 9,000 draws: four standard deviations are 0.017
    assert kept == pytest.approx(0.1 + 0.1 / (VOCAB - 6), abs=0.014)
    random = out.ids[chosen & (out.ids != MASK) & (out.ids != batch.ids)]
    assert len(set(random.tolist())) > 0.9 * (VOCAB - 6)  # from all of the vocabulary


def test_masking_depends_on_the_place_only() -> None:
    batch = batch_of(200)
    assert torch.equal(masked(batch, 1, 0).ids, masked(batch, 1, 0).ids)
    for other in (masked(batch, 2, 0), masked(batch, 1, 1), masked(batch, 1, 0, seed=1)):
        assert not torch.equal(masked(batch, 1, 0).targets, other.targets)
    assert torch.equal(batch.ids, batch_of(200).ids)  # the batch itself is not changed


def test_padding_is_never_a_target_even_if_its_id_is_a_token() -> None:
    batch = batch_of(100, least=0)
    special = frozenset({1, 2, MASK})  # 0, which padding is made of, is an ordinary token here
    assert batch.num_padding > 0 and (batch.ids[:102] == 0).any()
    out = mask_batch(batch, masking(rate=1.0, special=special))
    assert not (out.targets[102:] != IGNORE).any()
    assert (out.targets[:102] == 0).any()


def loader() -> Loader:
    stream = np.random.default_rng(0)
    documents = [TokenDocument(id=str(i), tokens=stream.integers(6, VOCAB, 30 + i)) for i in range(40)]
    store = in_memory(documents, token_bytes=BYTES)
    return Loader({"text": store}, DataConfig(context=32, rows=2, micro_batches=2))


def hide(batch: Batch, *place: str | int) -> Batch:
    return mask_batch(batch, masking(), *place)


def test_a_masked_step_does_not_depend_on_earlier_calls() -> None:
    plain, hiding = loader(), loader().mapped(hide)
    with hiding.prefetch(3) as feed:
        ahead = [next(feed) for _ in range(3)]
    for step, made in enumerate(ahead, start=3):
        again = loader().mapped(hide).batch(step)
        for one, other, text in zip(made, again, plain.batch(step), strict=True):
            assert torch.equal(one.ids, other.ids) and torch.equal(one.targets, other.targets)
            chosen = one.targets != IGNORE
            assert torch.equal(torch.where(chosen, one.targets, one.ids), text.ids)  # the original text is the same
            assert torch.equal(one.cu_seqlens, text.cu_seqlens)
    assert not torch.equal(ahead[0][0].targets != IGNORE, ahead[1][0].targets != IGNORE)
    assert plain.batch(3)[0].target_bytes > 0  # the original loader still predicts the next token


def test_impossible_masking_is_refused() -> None:
    batch = batch_of(10)
    with pytest.raises(BaguError, match="rate is 0"):
        masking(rate=0)
    with pytest.raises(BaguError, match="mask_id 200"):
        masking(mask_id=200)
    with pytest.raises(BaguError, match="are special"):
        mask_batch(batch, masking(special=frozenset(range(VOCAB))))
