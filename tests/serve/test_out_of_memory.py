"""A step that does not fit the device's memory: smaller steps follow, and no request is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_engine import small_engine, small_model

from bagu.serve.engine import Engine
from bagu.serve.request import Sampling

PROMPTS = [list(range(1, 50)), [5], [7, 8, 9] * 9, list(range(60, 64)), list(range(30))]


def engine_with_memory_for(tokens: int, **settings: Any) -> Engine:
    """An engine whose model raises, as the allocator does, for a step of more tokens than this."""
    model = small_model()

    def forward(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if len(args[0]) > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model.register_forward_pre_hook(forward)
    return small_engine(model, **settings)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_steps_shrink_until_they_fit_and_the_text_is_the_same(tokens: int, overlap: bool) -> None:
    settings = {"async_scheduling": overlap, "invariant": True}
    asked = [Sampling(max_tokens=12, temperature=0.8, seed=i, n=2 if i == 2 and tokens > 1 else 1) for i in range(5)]
    want = small_engine(small_model(), **settings).generate(PROMPTS, asked)
    engine = engine_with_memory_for(tokens, **settings)
    with pytest.warns(RuntimeWarning, match="ran out of memory; steps now have at most"):
        found = engine.generate(PROMPTS, asked)
    assert [(c.tokens, c.finish) for c in found] == [(c.tokens, c.finish) for c in want]
    assert engine.blocks.used_count == 0
    engine.scheduler.queues.check_integrity()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("part", ["stage", "launch", "sample"])
def test_a_step_that_fails_in_any_part_is_computed_again(part: str, overlap: bool) -> None:
    """With overlapping steps another one is in flight: the one before is committed, the one after is dropped too."""
    settings = {"async_scheduling": overlap, "invariant": True}
    asked = [Sampling(max_tokens=12, temperature=0.8, seed=i, logprobs=1) for i in range(5)]
    want = small_engine(small_model(), **settings).generate(PROMPTS, asked)
    engine, calls = small_engine(small_model(), **settings), []
    owner: Any = engine.sampler if part == "sample" else engine.runner
    call = getattr(owner, part)

    def fails_twice(*args: Any) -> Any:
        calls.append(len(engine.scheduler.queues.in_flight))
        if len(calls) in (3, 8):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return call(*args)

    setattr(owner, part, fails_twice)
    with pytest.warns(RuntimeWarning, match="ran out of memory; steps now have at most"):
        found = engine.generate(PROMPTS, asked)
    assert [(c.tokens, c.logprobs) for c in found] == [(c.tokens, c.logprobs) for c in want]
    while engine.has_work:
        engine.step()
    engine.scheduler.queues.check_integrity()
    assert engine.blocks.used_count == 0
    assert max(calls) == 1 + overlap


def test_prompt_logprobs_are_returned_once() -> None:
    want = small_engine(small_model(), invariant=True).score(PROMPTS[:1] + PROMPTS[2:], [3, 1, 1, 9])
    with pytest.warns(RuntimeWarning, match="ran out of memory"):
        found = engine_with_memory_for(7, invariant=True).score(PROMPTS[:1] + PROMPTS[2:], [3, 1, 1, 9])
    assert found == want


def test_a_single_token_that_does_not_fit_ends_the_engine() -> None:
    with pytest.warns(RuntimeWarning), pytest.raises(torch.OutOfMemoryError):
        engine_with_memory_for(0, invariant=True).generate(PROMPTS, Sampling(max_tokens=4))
