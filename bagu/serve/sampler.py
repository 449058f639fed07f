"""The sampler: keeps the state of each request, and samples the tokens of a step with the functions of sample.py.

Logprobs are those of the unmodified model, before temperature and penalties. They are computed by the same function as
the trainer's, ops.linear_cross_entropy (with int8 weights from the int8 logits).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bagu.serve.plan import Plan, Sequence
from bagu.serve.request import PromptLogprobs, Request, TokenEvent, TokenLogprob
from bagu.serve.runner import Runner, RunnerOutput
from bagu.serve.sample import Row, argmax, greedy, sample, top_logprobs
from bagu.serve.stream import TextStream
from bagu.types import Tokenizer

__all__ = ["Sampler", "SamplerOutput"]


class SamplerOutput(NamedTuple):
    """A token for each of `plan.sampled`, and the prompt logprobs that this step completed."""

    tokens: torch.Tensor  # [N] int64, on the model's device
    logprobs: list[TokenLogprob | None] | None
    prompts: list[PromptLogprobs]


@dataclass(slots=True)
class _RequestState:
    seed: int
    greedy: bool  # every token is the argmax of the unmodified logits
    unfinished: int  # choices
    texts: list[TextStream]  # one per choice if the request has stop strings, else empty
    scores: list[TokenLogprob] = field(default_factory=list)  # prompt logprobs so far


class Sampler:
    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, seed: int, eos_ids: tuple[int, ...]) -> None:
        self.runner, self.tokenizer, self.eos_ids = runner, tokenizer, eos_ids
        self._seeds = random.Random(seed)  # for requests without a seed
        self._states: dict[str, _RequestState] = {}
        # Ids of requests that need more than an argmax per token. Usually all are empty, and a step skips the work.
        self._not_plain: set[str] = set()  # with random sampling, penalties or logprobs
        self._with_prompt_logprobs: set[str] = set()
        self._with_stop_strings: set[str] = set()

    def add(self, request: Request) -> None:
        s = request.sampling
        seed = self._seeds.getrandbits(62) if s.seed is None else s.seed
        texts = [TextStream(self.tokenizer, s) for _ in range(s.n)] if s.stop and self.tokenizer is not None else []
        state = self._states[request.id] = _RequestState(seed, greedy([Row(s, seed, 0, (), 0)]), s.n, texts)
        belongs = (not state.greedy or s.logprobs is not None, s.prompt_logprobs is not None, bool(texts))
        for belongs_here, group in zip(belongs, self._groups, strict=True):
            if belongs_here:
                group.add(request.id)

    def remove(self, request_id: str) -> None:
        self._states.pop(request_id, None)
        for group in self._groups:
            group.discard(request_id)

    @property
    def _groups(self) -> tuple[set[str], ...]:
        return self._not_plain, self._with_prompt_logprobs, self._with_stop_strings

    @property
    def has_stop_strings(self) -> bool:
        """Whether an unfinished request has stop strings, so that `check_stop` must see every event."""
        return bool(self._with_stop_strings)

    def sample(self, plan: Plan, step: RunnerOutput) -> SamplerOutput:
        """Sample a token for each of `plan.sampled`, and compute the prompt logprobs that requests ask for. The token
        of a sequence that finished after the plan was made is ignored."""
        prompts = self._score(plan, step) if self._with_prompt_logprobs else []
        if not plan.sampled:
            return SamplerOutput(torch.empty(0, dtype=torch.int64), None, prompts)
        if not self._not_plain:
            return SamplerOutput(self._argmax(step), None, prompts)
        states = self._states
        if all(s.finished or states[s.request.id].greedy for s in plan.sampled):
            tokens = self._argmax(step)
        else:
            tokens = sample(step.logits, [self._row(s) for s in plan.sampled])
        return SamplerOutput(tokens, self._logprobs(plan, step, tokens), prompts)

    def check_stop(self, event: TokenEvent) -> TokenEvent:
        """The event, finished if the text now contains a stop string. Removes a request with its last choice."""
        state = self._states[event.request_id]
        if state.texts and event.finish != "stop":
            text = state.texts[event.index]
            text.read(event)
            if text.stop is not None:
                event = event._replace(finish="stop", stop_reason=text.stop)
        if event.finish is not None:
            state.unfinished -= 1
            if not state.unfinished:
                self.remove(event.request_id)
        return event

    def _argmax(self, step: RunnerOutput) -> torch.Tensor:
        return argmax(step.logits) if step.argmax is None else step.argmax

    def _row(self, sequence: Sequence) -> Row:
        request = sequence.request
        seed = 0 if sequence.finished else self._states[request.id].seed
        return Row(request.sampling, seed, sequence.index, sequence.tokens, sequence.num_prompt, self.eos_ids)

    def _logprobs(self, plan: Plan, step: RunnerOutput, tokens: torch.Tensor) -> list[TokenLogprob | None] | None:
        counts = [None if s.finished else s.request.sampling.logprobs for s in plan.sampled]
        asked = [i for i, n in enumerate(counts) if n is not None]
        if not asked:
            return None
        rows = torch.tensor(asked, device=tokens.device)
        hidden, logits, targets = (x.index_select(0, rows) for x in (step.sampled, step.logits, tokens))
        found = top_logprobs(
            logits, self.runner.logprobs(hidden, logits, targets), targets, [counts[i] or 0 for i in asked]
        )
        by_row = dict(zip(asked, found, strict=True))
        return [by_row.get(i) for i in range(len(counts))]

    def _score(self, plan: Plan, step: RunnerOutput) -> list[PromptLogprobs]:
        """Compute the logprobs of the prompt tokens that follow this step's positions; return the completed prompts."""
        done = []
        for piece, first in zip(plan.slices, plan.cu_seqlens, strict=False):
            s = piece.sequence
            if not s.scores or s.finished or piece.start >= s.num_prompt:
                continue
            request, state = s.request, self._states[s.request.id]
            if scored := piece.scored:
                hidden = step.hidden[first + scored.start - piece.start : first + scored.stop - piece.start]
                targets = torch.tensor(s.tokens[scored.start + 1 : scored.stop + 1], device=hidden.device)
                count = request.sampling.prompt_logprobs or 0
                logits, _ = self.runner.project(hidden)
                found = self.runner.logprobs(hidden, logits, targets)
                state.scores += top_logprobs(logits, found, targets, [count] * len(targets))
            if piece.start + piece.length >= s.num_prompt:
                done.append(PromptLogprobs(request.id, max(request.score_start, 1), tuple(state.scores)))
        return done
