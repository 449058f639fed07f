"""Speculation on a GPU: drafts verified by CUDA graphs, with overlapping steps. None of it may change the text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_engine import small_model
from test_speculation import PROMPTS, SAMPLINGS, Script, details, requests, run, words

from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.serve.speculation.draft_model import DraftSource

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no graphs": {"cuda_graphs": False},
    "one step at a time": {"async_scheduling": False},
    "preempted": {"block_size": 8, "num_blocks": 16},
}
DRAFTS = {"speculative": "ngram", "speculative_always": True}


def engine(kind: str, dtype: torch.dtype, draft: DraftSource | None = None, **settings: Any) -> Engine:
    chosen = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64} | settings
    return Engine(small_model(kind, dtype).cuda(), None, EngineConfig(**chosen), draft=draft)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gqa", "mqa, QK norm", "windows in all layers", "mla"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "penalties", "choices"])
def test_the_text_is_the_same_with_drafts(sampling: str, kind: str, way: str) -> None:
    asked = requests(SAMPLINGS[sampling])
    plain = run(engine(kind, torch.float32, **WAYS[way]), asked)
    for wrong in (3, 1000):
        speculated = engine(kind, torch.float32, **WAYS[way], **DRAFTS)
        assert speculated.speculator is not None
        speculated.speculator.proposer = Script(plain, wrong)
        for _ in range(2):  # the second time with captured graphs and a warm prefix cache
            assert words(run(speculated, asked)) == words(plain)
        assert speculated.stats().accepted_tokens > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_draft_model_changes_no_text(way: str) -> None:
    asked = requests(SAMPLINGS["greedy"])
    plain = run(engine("gqa", torch.float32, **WAYS[way]), asked)
    draft = DraftSource(small_model("gqa").cuda())
    speculated = engine("gqa", torch.float32, draft, **WAYS[way], **DRAFTS | {"speculative": "itself"})
    assert words(run(speculated, asked)) == words(plain)
    assert speculated.stats().accepted_tokens > 40


@pytest.mark.parametrize("kind", ["gqa", "mqa, QK norm", "windows in some"])
def test_in_invariant_mode_logprobs_have_the_same_bits(kind: str) -> None:
    asked = requests(Sampling(max_tokens=30, seed=4, logprobs=2, ignore_eos=True), PROMPTS)
    plain = run(engine(kind, torch.bfloat16, invariant=True), asked)
    for way in ({}, {"cuda_graphs": False}):
        speculated = engine(kind, torch.bfloat16, invariant=True, **way, **DRAFTS)
        assert speculated.speculator is not None
        speculated.speculator.proposer = Script(plain, 4)
        assert details(run(speculated, asked)) == details(plain)
        assert speculated.stats().accepted_tokens > 0
