"""The first steps of an engine, before it is ready."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bagu.errors import ArgumentError, BaguError
from bagu.serve.request import Request, Sampling, TokenEvent

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.serve.engine import Engine

WARM_UP_TOKENS = 8  # of each warm-up prompt


def warm_up(engine: Engine, prompts: Sequence[str] = ()) -> None:
    """Run one short request, so that the first client does not wait for kernels and buffers to be initialized, and
    then the prompts of the configuration. Raises ArgumentError if one of them cannot run or has no probabilities."""
    assert engine.tokenizer is not None
    sampling = Sampling(max_tokens=2, temperature=0.5, ignore_eos=True)
    engine.submit(Request(id="warm-up", prompt=(0,), sampling=sampling))
    _finish(engine)
    for number, text in enumerate(prompts, 1):
        try:
            ids = tuple(engine.tokenizer.encode(text))
            sampling = Sampling(max_tokens=WARM_UP_TOKENS, temperature=0.0, logprobs=0)
            engine.submit(Request(id=f"warm-up-{number}", prompt=ids, sampling=sampling))
        except BaguError as error:
            raise ArgumentError(f"warm-up prompt {number} cannot run: {error}", hint=error.hint) from error
        if not all(map(math.isfinite, _finish(engine))):
            hint = "the weights are broken, or overflow in this dtype"
            raise ArgumentError(f"warm-up prompt {number}: the model's probabilities are not finite", hint=hint)


def _finish(engine: Engine) -> list[float]:
    """Run steps until the engine has no work; returns the log probabilities of the sampled tokens, if requested."""
    found = []
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.logprob is not None:
                found.append(event.logprob)
    return found
