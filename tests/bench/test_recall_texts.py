"""The texts of benchmarks/tools/long_context.py."""

import re

import numpy as np
import pytest

from bagu.types import IGNORE
from benchmarks.tools.recall_texts import Planted, Texts, tokens_of

LENGTH = 700


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return Texts.make(tmp_path_factory.mktemp("texts"), 400, every=60)


def test_tokens_are_those_of_the_whole_text(texts: Texts) -> None:
    for seed in range(4):
        ids = tokens_of(texts.text(np.random.default_rng(seed), LENGTH)).tolist()
        assert len(ids) == LENGTH and texts.tokenizer.encode(texts.tokenizer.decode(ids)) == ids


def test_every_question_follows_the_line_that_answers_it(texts: Texts) -> None:
    asked = 0
    for seed in range(8):
        text = texts.tokenizer.decode(tokens_of(texts.text(np.random.default_rng(seed), LENGTH)).tolist())
        for found in re.finditer(r"\nassert (\w+)_code == (\d{4})\n", text):
            assert f"\n{found[1]}_code = {found[2]}\n" in text[: found.start() + 1]
            asked += 1
    assert asked > 10


def test_a_step_is_a_function_of_seed_and_number(texts: Texts) -> None:
    loader = Planted(texts=texts, length=LENGTH, rows=2, micro_batches=2, seed=3)
    again = Planted(texts=texts, length=LENGTH, rows=2, micro_batches=2, seed=3)
    with loader.prefetch(1) as batches:
        first = next(batches)
    for a, b in zip(first, again.step(1), strict=True):
        assert a.ids.equal(b.ids) and a.targets.equal(b.targets)
    assert not first[0].ids.equal(again.step(2)[0].ids)


def test_targets_are_the_next_tokens_but_values_that_nothing_predicts(texts: Texts) -> None:
    row = texts.text(np.random.default_rng(0), LENGTH + 1)
    batch = texts.batch(row[None])
    ids, target = tokens_of(row)[1:], batch.targets.numpy() != IGNORE
    assert (batch.targets.numpy()[target] == ids[target]).all() and batch.num_targets == target.sum()
    lines = re.findall(r"\n\w+_code = (\d{4})", texts.tokenizer.decode(tokens_of(row).tolist()))
    hidden = re.findall(r"\d{4}", texts.tokenizer.decode(ids[~target].tolist()))
    assert hidden[: len(lines)] == lines[: len(hidden)] and len(hidden) >= len(lines) - 1 > 2


def test_texts_begin_short(texts: Texts) -> None:
    loader = Planted(texts=texts, length=256, rows=2, micro_batches=1, seed=0, short=[(2, 64), (3, 128)])
    assert [loader.step(n)[0].max_len for n in range(4)] == [64, 64, 128, 256]
    assert {len(loader.step(n)[0].ids) for n in range(4)} == {512}
