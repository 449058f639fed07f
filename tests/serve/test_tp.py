"""Engines with tensor parallelism, on real processes with Gloo: they give the tokens of one process, and name a rank
that dies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_engine import small_engine, small_model

from bagu.errors import ArgumentError
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling, TokenEvent
from tests.forked import starts

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [*range(20, 60)], [5] * 17]
FEW: dict[str, Any] = {"num_blocks": 24, "max_num_batched_tokens": 16}  # chunked prefill, and preemption


@pytest.fixture(scope="module")
def divided() -> Iterator[Engine]:
    """Steps overlap, so that tokens go from step to step without the plan."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BAGU_START_TIMEOUT", "180")  # a loaded machine imports torch slowly
        with starts():
            engine = small_engine(small_model(), tp=2, threads=1, async_scheduling=True, **FEW)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def whole() -> Engine:
    return small_engine(small_model(), **FEW)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=16, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=16, temperature=1.0, seed=3, n=2, top_p=0.9, ignore_eos=True),
        Sampling(max_tokens=8, temperature=0.8, seed=5, frequency_penalty=0.5, logit_bias={7: 2.0}),
    ],
    ids=["greedy", "seeded", "penalties"],
)
def test_tokens_are_those_of_one_process(divided: Engine, whole: Engine, sampling: Sampling) -> None:
    found, wanted = divided.generate(PROMPTS, sampling), whole.generate(PROMPTS, sampling)
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    assert len({tuple(c.tokens) for c in wanted}) > 1


def close_to(found: float, wanted: float) -> bool:
    """Logprobs of fp32 logits whose sums have another order: some ulps of the logits, which are below 64."""
    return abs(found - wanted) <= 32 * torch.finfo(torch.float32).eps * 64


def test_logprobs_are_those_of_one_process(divided: Engine, whole: Engine) -> None:
    sampling = Sampling(max_tokens=4, temperature=0.0, logprobs=3)
    pairs = list(zip(divided.generate(PROMPTS, sampling), whole.generate(PROMPTS, sampling), strict=True))
    for found, wanted in pairs:
        assert found.logprobs and wanted.logprobs
        assert all(map(close_to, found.logprobs, wanted.logprobs))
    starts = [1, 2, 3, 4]
    scores = zip(divided.score_tokens(PROMPTS, starts, top=2), whole.score_tokens(PROMPTS, starts, top=2), strict=True)
    for found_tokens, wanted_tokens in scores:
        for f, w in zip(found_tokens, wanted_tokens, strict=True):
            assert close_to(f.logprob, w.logprob)
            assert [id for id, _ in f.top] == [id for id, _ in w.top]


def test_cached_prefixes_and_preempted_sequences_give_the_same_tokens(divided: Engine, whole: Engine) -> None:
    shared = [*range(30, 70)]
    prompts = [[*shared, i] for i in range(6)]
    sampling = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    before = divided.stats()
    for engine in (divided, whole):
        engine.generate([shared], sampling)
    found, wanted = divided.generate(prompts, sampling), whole.generate(prompts, sampling)
    after = divided.stats()
    assert [c.tokens for c in found] == [c.tokens for c in wanted]
    assert after.prefix_hits > before.prefix_hits
    assert after.preemptions > before.preemptions


def test_an_aborted_request_leaves_the_others_as_they_are(divided: Engine, whole: Engine) -> None:
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    for id in ("kept", "aborted"):
        divided.submit(Request(id=id, prompt=(1, 2, 3), sampling=sampling))
    tokens: list[int] = []
    while divided.has_work:
        for event in divided.step():
            if isinstance(event, TokenEvent) and event.request_id == "kept" and event.token is not None:
                tokens.append(event.token)
        divided.abort("aborted")
    assert tokens == list(whole.generate([[1, 2, 3]], sampling)[0].tokens)
    assert divided.stats().blocks_used == 0


def test_a_rank_has_its_share_of_the_weights_and_of_the_cache(divided: Engine, whole: Engine) -> None:
    assert 2 * divided.runner.kv.num_bytes == whole.runner.kv.num_bytes
    part, full = divided.model.blocks[0].attention.qkv.weight, whole.model.blocks[0].attention.qkv.weight
    assert 2 * part.numel() == full.numel()


def test_weights_of_a_divided_engine_cannot_be_replaced(divided: Engine) -> None:
    with pytest.raises(ArgumentError, match="tp = 2 cannot be replaced"):
        divided.update_weights({})
    with pytest.raises(ArgumentError, match="tp = 2 cannot be replaced"):
        divided.weights_changed()


def test_a_second_engine_in_the_process_is_refused(divided: Engine) -> None:
    with pytest.raises(ArgumentError, match="in a process that has initialised"):
        Engine(small_model(), None, EngineConfig(tp=2))
