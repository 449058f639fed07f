"""The rows of a step to tokens: what the engine remembers of each request, put to the functions of sample.py.

Logprobs are of the model as it is, before temperature and penalties. They come from the one logprob function,
ops.linear_cross_entropy, as the trainer's do (with int8 from its own logits).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bagu.serve.plan import Plan, Sequence
from bagu.serve.request import PromptLogprobs, Request, TokenEvent, TokenLogprob
from bagu.serve.runner import Runner, Step
from bagu.serve.sample import Row, best, greedy, sample, top_logprobs
from bagu.serve.stream import TextStream
from bagu.types import Tokenizer

__all__ = ["Drawn", "Sampler"]


class Drawn(NamedTuple):
    """What a step drew, for each of `plan.sampled`, and the prompts whose logprobs it completed."""

    tokens: torch.Tensor  # [N] int64, on the model's device
    logprobs: list[TokenLogprob | None] | None
    prompts: list[PromptLogprobs]


@dataclass(slots=True)
class _Memory:
    """Of one request."""

    seed: int
    greedy: bool  # an argmax of the logits as they are is all it wants, at every token
    alive: int  # choices that have not ended
    texts: list[TextStream]  # one a choice, where stop strings are to be found
    scores: list[TokenLogprob] = field(default_factory=list)  # of the prompt, so far


class Sampler:
    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, seed: int, eos_ids: tuple[int, ...]) -> None:
        self.runner, self.tokenizer, self.eos_ids = runner, tokenizer, eos_ids
        self._seeds = random.Random(seed)  # for requests that bring none
        self._memory: dict[str, _Memory] = {}
        # Requests alive that ask for more than an argmax a token. Mostly there are none, and a step does not look.
        self._particular: set[str] = set()  # draws, penalties, logprobs
        self._scored: set[str] = set()  # logprobs of the prompt
        self._stopped: set[str] = set()  # stop strings

    def open(self, request: Request) -> None:
        s = request.sampling
        seed = self._seeds.getrandbits(62) if s.seed is None else s.seed
        looks = bool(s.stop) and self.tokenizer is not None
        texts = [TextStream(self.tokenizer, s) for _ in range(s.n)] if looks and self.tokenizer is not None else []
        memory = self._memory[request.id] = _Memory(seed, greedy([Row(s, seed, 0, (), 0)]), s.n, texts)
        asks = (not memory.greedy or s.logprobs is not None, s.prompt_logprobs is not None, bool(texts))
        for asked, group in zip(asks, self._groups, strict=True):
            if asked:
                group.add(request.id)

    def close(self, request_id: str) -> None:
        self._memory.pop(request_id, None)
        for group in self._groups:
            group.discard(request_id)

    @property
    def _groups(self) -> tuple[set[str], ...]:
        return self._particular, self._scored, self._stopped

    @property
    def reads(self) -> bool:
        """Whether the events of a step are to be read though they end nothing: for stop strings."""
        return bool(self._stopped)

    def draw(self, plan: Plan, step: Step) -> Drawn:
        """Draw a token for each sampled row, and score the prompts that asked for it. Sequences that ended after the
        plan was made get a token that nobody reads."""
        prompts = self._score(plan, step) if self._scored else []
        if not plan.sampled:
            return Drawn(torch.empty(0, dtype=torch.int64), None, prompts)
        if not self._particular:
            return Drawn(self._best(step), None, prompts)
        memory = self._memory
        if all(s.finished or memory[s.request.id].greedy for s in plan.sampled):
            tokens = self._best(step)
        else:
            tokens = sample(step.logits, [self._row(s) for s in plan.sampled])
        return Drawn(tokens, self._logprobs(plan, step, tokens), prompts)

    def read(self, event: TokenEvent) -> TokenEvent:
        """The event, with its finish where its text has come to a stop string; an ended choice is forgotten."""
        memory = self._memory[event.request_id]
        if memory.texts and event.finish != "stop":
            text = memory.texts[event.index]
            text.read(event)
            if text.stop is not None:
                event = event._replace(finish="stop", stop_reason=text.stop)
        if event.finish is not None:
            memory.alive -= 1
            if not memory.alive:
                self.close(event.request_id)
        return event

    def _best(self, step: Step) -> torch.Tensor:
        return best(step.logits) if step.likeliest is None else step.likeliest

    def _row(self, sequence: Sequence) -> Row:
        request = sequence.request
        seed = 0 if sequence.finished else self._memory[request.id].seed
        return Row(request.sampling, seed, sequence.index, sequence.tokens, sequence.num_prompt, self.eos_ids)

    def _logprobs(self, plan: Plan, step: Step, tokens: torch.Tensor) -> list[TokenLogprob | None] | None:
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

    def _score(self, plan: Plan, step: Step) -> list[PromptLogprobs]:
        """Logprobs of the prompt tokens after this step's positions; a prompt is handed out when its last one is in."""
        done = []
        for piece, first in zip(plan.slices, plan.cu_seqlens, strict=False):
            s = piece.sequence
            if not s.scores or s.finished or piece.start >= s.num_prompt:
                continue
            request, memory = s.request, self._memory[s.request.id]
            if scored := piece.scored:
                hidden = step.hidden[first + scored.start - piece.start : first + scored.stop - piece.start]
                targets = torch.tensor(s.tokens[scored.start + 1 : scored.stop + 1], device=hidden.device)
                count = request.sampling.prompt_logprobs or 0
                logits, _ = self.runner.project(hidden)
                found = self.runner.logprobs(hidden, logits, targets)
                memory.scores += top_logprobs(logits, found, targets, [count] * len(targets))
            if piece.start + piece.length >= s.num_prompt:
                done.append(PromptLogprobs(request.id, max(request.score_start, 1), tuple(memory.scores)))
        return done
