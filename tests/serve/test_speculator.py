"""What is proposed, and when a proposal is verified."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from small_engine import small_engine, small_model

from bagu.bench.known_text import Text, counts_upwards, known_workload
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.serve.graphs import Bucket, GraphInputs, padding
from bagu.serve.inputs import StepInputs
from bagu.serve.kv.paged import PagedKV
from bagu.serve.plan import Plan, Sequence
from bagu.serve.request import Request, Sampling
from bagu.serve.speculation.acceptance import Acceptance
from bagu.serve.speculation.ngram import PromptLookup
from bagu.serve.speculation.speculator import Candidate, Speculator
from bagu.serve.speculation.step_times import FORGET_STEPS, StepTimes
from bagu.serve.ways import Forward


def sequence(tokens: Seq[int], prompt: int = 1) -> Sequence:
    found = Sequence(Request(id="0", prompt=tuple(tokens[:prompt])), 0, (0.0, 0, 0), frozenset())
    found.tokens = list(tokens)
    return found


def test_lookup_proposes_what_followed_the_last_occurrence() -> None:
    tokens = [1, 2, 3, 50, 51, 9, 1, 2, 3, 60, 61, 62, 8, 1, 2, 3]
    assert PromptLookup().propose([sequence(tokens)], 3) == [[60, 61, 62]]
    assert PromptLookup().propose([sequence([*tokens, 4])], 3) == [[]]
    assert PromptLookup().propose([sequence([7])], 3) == [[]]
    assert PromptLookup().propose([sequence([5, 6] * 4)], 5) == [[5, 6, 5, 6, 5]]  # to the end and on, with its period


def test_lookup_reads_only_new_tokens_and_agrees_with_a_new_index() -> None:
    """Random text of few tokens: where the source is not followed further, one index grown token by token finds what
    an index of the whole text finds."""
    draw, lookup, text = random.Random(0), PromptLookup(), sequence([0, 1, 2])
    agree = 0
    for _ in range(400):
        text.tokens.append(draw.randrange(4))
        grown, fresh = lookup.propose([text], 4)[0], PromptLookup().propose([text], 4)[0]
        index = lookup._indices[text]
        assert index.read == len(text.tokens)
        if index.followed == 0 and not index.patience:
            assert grown == fresh
            agree += 1
        assert index.after == PromptLookup()._indices.setdefault(text, type(index)(text.tokens)).after
    assert agree > 100
    lookup.forget(text)
    assert not lookup._indices


@pytest.mark.parametrize("edit", [[], [90], [90, 91], [90, 91, 92]])
def test_lookup_goes_on_in_the_source_after_an_edit(edit: list[int]) -> None:
    """One token of the source is replaced by none to three others; the first tokens after it are enough to go on."""
    source = list(range(10, 40))
    text, lookup = sequence([*source, 1, 2, 3, *source[:12]], prompt=33), PromptLookup()
    lookup.propose([text], 4)
    for token in [*source[12:20], *edit, source[21], source[22]]:
        text.tokens.append(token)
        proposal = lookup.propose([text], 4)[0]
    assert proposal == source[23:27]


def test_acceptance_counts_guesses_also_of_proposals_that_were_not_verified() -> None:
    acceptance, tokens = Acceptance(4), [7, 8]
    assert acceptance.expected(4) == 0.0
    acceptance.propose([1, 2, 3, 4], 2)
    for token in (1, 2, 3, 4):
        acceptance.propose([9, 9, 9, 9], len(tokens))  # ignored: the first proposal is still compared
        tokens.append(token)
        acceptance.compare(tokens)
    once = acceptance.expected(4)
    assert 2.0 < once < 4.0 and acceptance.expected(1) < once
    for _ in range(10):
        acceptance.propose([5, 5, 5, 5], len(tokens))
        tokens += [5, 6]
        acceptance.compare(tokens)
    assert 0.8 < acceptance.expected(1) <= acceptance.expected(4) < 1.2  # the first guess is right, never the second


class Repeats:
    """Proposes the same token, which is always right."""

    def __init__(self, free: bool) -> None:
        self.free, self.asked = free, 0

    def propose(self, sequences: Seq[Sequence], count: int) -> list[list[int]]:
        self.asked += len(sequences)
        return [[5] * count for _ in sequences]

    def forget(self, sequence: Sequence) -> None:
        pass


def speculator(cost: float, *, free: bool = True, plain: float = 1.0) -> Speculator:
    """Measured: a plain step takes `plain`, and every drafted token `cost` more."""
    found = Speculator(Repeats(free), 7)
    for _ in range(3):
        found.times.record(1, False, plain)
        for count in (1, 3, 7):
            found.times.record(1 + count, True, plain + cost * count)
    return found


def lengths(found: Speculator, right: bool, tokens: int = 40) -> list[int]:
    """The number of drafts in each step of a sequence, whose guesses are right or wrong."""
    text, made = sequence([5]), []
    while len(text.tokens) < tokens:
        drafts = found.drafts([Candidate(text, 100)], 1, 100).get(text, ())
        made.append(len(drafts))
        text.tokens += [5] * (1 + len(drafts)) if right else [6]
    return made


def test_drafts_are_verified_where_they_pay() -> None:
    assert lengths(speculator(0.1), right=True)[-1] == 7
    assert lengths(speculator(0.1), right=True)[0] == 0  # a free proposer shows its acceptance first
    assert set(lengths(speculator(1.2), right=True)) == {0}  # verification costs more than a plain step
    assert set(lengths(speculator(0.1), right=False)) == {0}
    assert set(lengths(Speculator(Repeats(True), 7), right=True)) == {0}  # no step was timed yet
    always = Speculator(Repeats(True), 7, always=True)
    assert set(lengths(always, right=False)) == {7}


def test_a_costly_proposer_is_tried_and_then_rests() -> None:
    found = speculator(0.1, free=False)
    made = lengths(found, right=False, tokens=400)
    assert 1 <= sum(map(bool, made[:20])) <= 10  # tried, until the acceptance is known
    assert 0 < sum(map(bool, made[40:])) < 20  # tried again, seldom
    assert isinstance(found.proposer, Repeats) and found.proposer.asked == sum(map(bool, made))
    assert lengths(speculator(0.1, free=False), right=True)[-1] == 7


def test_the_likeliest_sequences_get_drafts_first_and_the_budget_is_kept() -> None:
    found = speculator(0.05)
    good, bad = sequence([5]), sequence([5])
    for _ in range(12):
        found.drafts([Candidate(good, 100), Candidate(bad, 100)], 2, 0)
        good.tokens.append(5)
        bad.tokens.append(6)
    assert set(found.drafts([Candidate(bad, 100), Candidate(good, 100)], 2, 100)) == {good}
    assert sum(map(len, found.drafts([Candidate(good, 2)], 1, 100).values())) <= 2
    assert not found.drafts([Candidate(good, 100)], 1, 0)


def test_times_of_steps_with_drafts_are_tried_again_after_a_while() -> None:
    times = StepTimes()
    assert times.plain(1) is None
    for _ in range(3):
        times.record(1, False, 1.0)
        times.record(8, True, 50.0)
    assert times.drafted(8, 1.0) == 50.0 and times.drafted(4, 1.0) == 1.0 and times.drafted(64, 1.0) == 50.0
    for _ in range(FORGET_STEPS + 1):
        times.record(1, False, 1.0)
    assert times.drafted(8, 1.0) == 1.0
    times.record(8, True, 90.0)  # the first may include a compilation
    times.record(8, True, 2.0)
    assert times.drafted(8, 1.0) == 1.0
    times.record(8, True, 2.0)
    assert times.drafted(8, 1.0) == 2.0


class Flat(StepTimes):
    """Every step takes as long."""

    def plain(self, tokens: int) -> float:
        return 1.0

    def drafted(self, tokens: int, least: float) -> float:
        return 1.0


@pytest.mark.parametrize("text", ["edit", "new"])
def test_known_text_is_generated_and_speculated_only_where_it_repeats(text: Text) -> None:
    config = ModelConfig(
        vocab_size=512, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
        max_len=256,
    )  # fmt: skip
    model = counts_upwards(init_weights(Transformer(config), 0)).eval()
    work = known_workload(text, 2, 120, 90, vocab_size=512)
    engine = small_engine(model, speculative="ngram", num_blocks=128)
    assert engine.speculator is not None
    engine.speculator.times = Flat()
    found = engine.generate(work.prompts, Sampling(max_tokens=91, temperature=0.0))
    for prompt, completion in zip(work.prompts, found, strict=True):
        assert list(completion.tokens) == [(prompt[-1] + 1 + i) % 512 for i in range(91)]
    stats = engine.stats()
    if text == "new":
        plain = small_engine(model, num_blocks=128)
        plain.generate(work.prompts, Sampling(max_tokens=91, temperature=0.0))
        assert stats.draft_tokens == 0 and stats.steps == plain.stats().steps
    else:
        assert stats.accepted_tokens > 100 and stats.steps < 50


def test_a_padded_step_has_the_same_rows() -> None:
    """What a CUDA graph computes of a step with several tokens of a sequence: here by the model itself."""
    model = small_model()
    kv = PagedKV(model.config, 33, 4)  # the last block is in no table
    steps = StepInputs(kv, torch.device("cpu"), 4, 64, adapters=False)
    forward = Forward(model, kv, steps)
    steps.tables[:3, :8] = [[i * 8 + j for j in range(8)] for i in range(3)]
    starts, slices = [5, 0, 9], [[3], [4, 5, 6, 7], [8, 9]]
    plan = Plan(
        number=0, slices=[], copies=[], ids=[t for s in slices for t in s],
        positions=[a + i for a, s in zip(starts, slices, strict=True) for i in range(len(s))], cu_seqlens=[0, 1, 5, 7],
        context_lens=[6, 4, 11], table_rows=[0, 1, 2], table_writes=[], sampled=[], sample_rows=list(range(7)),
        next_drafts=[-1] * 7, late=[(1, 0)], num_decodes=1, num_drafts=4, num_prompts=0, max_len=4, max_context=11,
    )  # fmt: skip
    for pool in kv.tensors:
        pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(0)))
    before, late = [pool.clone() for pool in kv.tensors], torch.tensor([33])
    with torch.inference_mode():
        batch, late_rows, _ = steps.batch(plan)
        assert late_rows is not None
        late_rows.fill(batch.ids, late)
        want = forward(batch)
        after = [pool.clone() for pool in kv.tensors]
        for pool, old in zip(kv.tensors, before, strict=True):
            pool.copy_(old)
        more = padding(7, 3, 4)
        size = Bucket(
            sequences=3 + len(more.ends), tokens=7 + more.tokens, max_len=more.max_len, context=32, adapters=False
        )
        assert (size.tokens, size.sequences, size.max_len) == (8, 9, 16)
        inputs = GraphInputs(size, 4, 4, torch.device("cpu"))
        inputs.fill(steps.arrays(plan), more, 32, 4)
        inputs.late(1).fill(inputs.batch.ids, late)
        got = forward(inputs.batch)[:7]
    torch.testing.assert_close(got, want)
    for pool, other in zip(kv.tensors, after, strict=True):
        torch.testing.assert_close(pool[:-1], other[:-1])
