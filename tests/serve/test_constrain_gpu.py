"""Constrained decoding on a GPU: overlapping steps, CUDA graphs of several tokens, masks of other threads."""

from __future__ import annotations

from typing import Any

import pytest
from constrained import POINT, constrained_engine, constrained_model, json_tokenizer

from bagu.serve.grammar import Grammar
from bagu.serve.request import Sampling

pytest.importorskip("llguidance")
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "settings",
    [{}, {"cuda_graphs": False}, {"async_scheduling": False}, {"num_blocks": 36}],
    ids=["as it comes", "no graphs", "one step at a time", "preempted"],
)
def test_forced_tokens_are_those_that_would_be_sampled(settings: dict[str, Any]) -> None:
    """Requests with logprobs take a step for every token, and these are drawn from the same distribution."""
    tokenizer = json_tokenizer()
    engine = constrained_engine(constrained_model(tokenizer).cuda(), tokenizer, **settings)
    prompts = [tokenizer.encode(f"hello {i}") for i in range(12)]
    asked = {"max_tokens": 120, "grammar": Grammar.json_schema(POINT)}
    fast = [Sampling(**asked, seed=i) for i in range(12)]
    slow = [Sampling(**asked, seed=i, logprobs=0) for i in range(12)]
    expected = [c.tokens for c in engine.generate(prompts, slow)]
    assert engine.stats().forced_tokens == 0
    for _ in range(2):  # the second time with captured graphs and a warm prefix cache
        assert [c.tokens for c in engine.generate(prompts, fast)] == expected
    assert engine.stats().forced_tokens > 100
    assert ("num_blocks" in settings) == (engine.stats().preemptions > 0)
