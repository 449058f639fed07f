"""The sampler: keeps the state of each request, and samples the tokens of a step with the functions of sample.py.

Logprobs are those of the unmodified model, before temperature and penalties. They are computed by the same function as
the trainer's, ops.linear_cross_entropy (with quantized weights from their logits).
"""

import math
import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from bagu.ops.sample.torch_backend import argmax
from bagu.serve.changes import Changes, Row, adjusts, changes
from bagu.serve.constrain.masks import Masks
from bagu.serve.plan import Plan, Sequence, Slice
from bagu.serve.request import NOT_FINITE, PromptLogprobs, Request, TokenEvent, TokenLogprob
from bagu.serve.runner import Runner, RunnerOutput
from bagu.serve.sample import RowLogprobs, sample, top_logprobs
from bagu.serve.slots import SPARE, Slots
from bagu.serve.stream import TextStream
from bagu.types import Tokenizer


class SampledLogprobs(NamedTuple):
    """The logprobs of the sampled tokens whose requests ask for them."""

    asked: list[int]  # indices into `plan.sampled`
    values: RowLogprobs  # of these

    def details(self, count: int) -> list[float | TokenLogprob | None]:
        """The logprobs of all `count` sampled tokens, None where none were asked for."""
        found: Seq[float | TokenLogprob] = self.values.details()
        if len(found) == count:  # all, as in a rollout
            return [*found]
        by_row = dict(zip(self.asked, found, strict=True))
        return [by_row.get(i) for i in range(count)]


class SamplerOutput(NamedTuple):
    """A token for each of `plan.sampled`, and the prompt logprobs that this step completed."""

    tokens: torch.Tensor  # [N] int64, on the model's device
    logprobs: SampledLogprobs | None  # on the model's device
    prompts: list[PromptLogprobs]
    sums: torch.Tensor | None = None  # [N] fp32 of the logits, if a sequence has an adapter: NaN or infinite if one is


@dataclass(slots=True)
class _RequestState:
    slots: list[int]  # one per choice
    unfinished: int  # choices
    texts: list[TextStream]  # one per choice if the request has stop strings, else empty
    scores: list[TokenLogprob] = field(default_factory=list)  # prompt logprobs so far


class Sampler:
    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, seed: int, eos_ids: tuple[int, ...]) -> None:
        self.runner, self.tokenizer = runner, tokenizer
        self._seeds = random.Random(seed)  # for requests without a seed
        self._states: dict[str, _RequestState] = {}
        self._slots = Slots(runner.source.config.vocab_size)
        self.masks = Masks(runner.source.config.vocab_size, eos_ids, runner.device)
        self._special = frozenset(getattr(tokenizer, "special_ids", {}).values())
        # Ids of requests that need more than an argmax per token. Usually all are empty, and a step skips the work.
        self._not_plain: set[str] = set()  # with random sampling, bias, penalties, a grammar or logprobs
        self._adjusted: set[str] = set()  # with bias, penalties or masked tokens
        self._with_prompt_logprobs: set[str] = set()
        self._with_stop_strings: set[str] = set()
        self._broken: set[tuple[str, int]] = set()  # unfinished choices whose logits are not finite
        self.not_finite = 0  # such choices so far

    def add(self, request: Request, matchers: Seq[tuple[int, Any]] = ()) -> None:
        """Add a request; `matchers` are its compiled grammar for each choice, if it has one."""
        s = request.sampling
        if matchers:
            self.masks.add(request, matchers, self._special)
        seed = self._seeds.getrandbits(62) if s.seed is None else s.seed
        texts = [TextStream(self.tokenizer, s) for _ in range(s.n)] if s.stop and self.tokenizer is not None else []
        slots = [self._slots.add(s, seed, choice, len(request.prompt)) for choice in range(s.n)]
        self._states[request.id] = _RequestState(slots, s.n, texts)
        adjusted = adjusts(s)
        not_plain = s.temperature > 0.0 or adjusted or s.logprobs is not None or bool(matchers)
        belongs = (not_plain, adjusted, s.prompt_logprobs is not None, bool(texts))
        for belongs_here, group in zip(belongs, self._groups, strict=True):
            if belongs_here:
                group.add(request.id)

    def remove(self, request_id: str) -> None:
        state = self._states.pop(request_id, None)
        if state is not None:
            self._slots.remove(state.slots)
            self._broken -= {(request_id, index) for index in range(len(state.slots))}
        self.masks.remove(request_id)
        for group in self._groups:
            group.discard(request_id)

    def cancel(self, plan: Plan) -> None:
        """Drop the prompt logprobs of a plan that will not be committed."""
        for piece in plan.slices:
            sequence = piece.sequence
            if sequence.scores and not sequence.finished:
                kept = sequence.score_next - max(sequence.request.score_start - 1, 0)
                del self._states[sequence.request.id].scores[kept:]

    @property
    def _groups(self) -> tuple[set[str], ...]:
        return self._not_plain, self._adjusted, self._with_prompt_logprobs, self._with_stop_strings

    @property
    def checks_every_event(self) -> bool:
        """Whether `check_stop` must see every event: a request has stop strings, or a grammar or adapter has failed."""
        return bool(self._with_stop_strings or self._broken) or self.masks.has_failures

    def check_finite(self, plan: Plan, sums: Seq[float]) -> None:
        """Note the choices whose adapter gave logits that are not finite; `check_stop` ends them."""
        for sequence, total in zip(plan.sampled, sums, strict=True):
            if sequence.adapter is not None and not sequence.finished and not math.isfinite(total):
                self._break(sequence)

    def _break(self, sequence: Sequence) -> None:
        choice = (sequence.request.id, sequence.index)
        self.not_finite += choice not in self._broken
        self._broken.add(choice)

    def advance(self, plan: Plan, tokens: Seq[int]) -> Mapping[Sequence, Seq[int]]:
        """Let the grammars consume the tokens that a plan sampled, and begin their next masks; returns the tokens that
        must follow."""
        return self.masks.advance(plan, tokens) if self.masks else {}

    def start_masks(self, plan: Plan) -> None:
        """Begin to compute the masks of a plan that are not begun yet: those of first tokens."""
        if self.masks:
            self.masks.start(plan)

    def sample(self, plan: Plan, step: RunnerOutput) -> SamplerOutput:
        """Sample a token for each of `plan.sampled`, and compute the prompt logprobs that requests ask for. The token
        of a sequence that finished after the plan was made is ignored."""
        prompts = self._score(plan, step) if self._with_prompt_logprobs else []
        if not plan.sampled:
            return SamplerOutput(torch.empty(0, dtype=torch.int64), None, prompts)
        sums = None  # the weights of a base model are the operator's; those of an adapter come by request
        if any(s.adapter is not None for s in plan.sampled):
            sums = step.logits.sum(1, dtype=torch.float32)
        if not self._not_plain:
            return SamplerOutput(self._argmax(step), None, prompts, sums)
        states = self._states
        slots = np.array([SPARE if s.finished else states[s.request.id].slots[s.index] for s in plan.sampled])
        before = plan.drafts_before() if plan.num_drafts else [[] for _ in plan.sampled]
        changed = self._changes(plan, before) if self._adjusted else None
        mask = self.masks.finish(plan) if self.masks else None
        if changed is None and mask is None and self._slots.greedy(slots):
            tokens = self._argmax(step)
        else:
            lengths = np.array([len(s.tokens) + len(drafts) for s, drafts in zip(plan.sampled, before, strict=True)])
            parameters = self._slots.parameters(slots, lengths)
            tokens = sample(step.logits, parameters, changed, self.runner.inputs.to_device, mask)
        return SamplerOutput(tokens, self._logprobs(plan, step, tokens), prompts, sums)

    def check_stop(self, event: TokenEvent) -> TokenEvent:
        """The event, finished if the text now contains a stop string, or if the choice cannot go on. Removes a request
        with its last choice."""
        state = self._states[event.request_id]
        broken = NOT_FINITE if (event.request_id, event.index) in self._broken else None
        if failure := broken or self.masks.failure(event.request_id, event.index):
            event = event._replace(token=None, logprob=None, top=None, finish="error", stop_reason=failure)
        elif state.texts and event.finish != "stop":
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

    def _changes(self, plan: Plan, before: list[list[int]]) -> Changes | None:
        """The logits that bias, penalties and masks change. `before`: the drafts between a sequence and its sample."""
        rows = [
            Row(s.request.sampling, s.tokens + drafts if drafts else s.tokens, s.num_prompt, s.stops)
            if s.request.id in self._adjusted and not s.finished
            else None
            for s, drafts in zip(plan.sampled, before, strict=True)
        ]
        return changes(rows, self._slots.vocab_size)

    def _logprobs(self, plan: Plan, step: RunnerOutput, tokens: torch.Tensor) -> SampledLogprobs | None:
        counts = [None if s.finished else s.request.sampling.logprobs for s in plan.sampled]
        asked = [i for i, n in enumerate(counts) if n is not None]
        if not asked:
            return None
        hidden, logits, targets = step.sampled, step.logits, tokens
        if len(asked) < len(counts):
            (rows,) = self.runner.inputs.to_device(np.array(asked, dtype=np.int64))
            hidden, logits, targets = (x.index_select(0, rows) for x in (hidden, logits, targets))
        own = self.runner.logprobs(hidden, targets, logits)
        return SampledLogprobs(asked, top_logprobs(logits, own, targets, [counts[i] or 0 for i in asked]))

    def _score(self, plan: Plan, step: RunnerOutput) -> list[PromptLogprobs]:
        """Compute the logprobs of the prompt tokens that follow this step's positions; return the completed prompts."""
        pieces = [
            (piece, first)
            for piece, first in zip(plan.slices, plan.cu_seqlens, strict=False)
            if piece.sequence.scores and not piece.sequence.finished and piece.start < _scored_end(piece.sequence)
        ]
        scored = [(piece, first + r.start - piece.start, r) for piece, first in pieces if (r := piece.scored)]
        if scored:
            self._score_rows(step.hidden, scored)
        done = []
        for piece, _ in pieces:
            request = piece.sequence.request
            if piece.start + piece.length >= _scored_end(piece.sequence):
                scores = tuple(self._states[request.id].scores)
                if piece.sequence.adapter is not None and any(math.isnan(score.logprob) for score in scores):
                    self._break(piece.sequence)
                done.append(PromptLogprobs(request.id, max(request.score_start, 1), scores))
        return done

    def _score_rows(self, hidden: torch.Tensor, scored: list[tuple[Slice, int, range]]) -> None:
        """Append the scores of slices, given as (slice, first row of `hidden`, positions): the logprobs of all slices
        in one call; top tokens, which need the logits, slice by slice, so that few logits exist at a time."""
        rows = [row for _, at, r in scored for row in range(at, at + len(r))]
        ids = [id for piece, _, r in scored for id in piece.sequence.tokens[r.start + 1 : r.stop + 1]]
        index, targets = self.runner.inputs.to_device(np.array(rows, dtype=np.int64), np.array(ids, dtype=np.int64))
        wanted = hidden.index_select(0, index)
        logprobs, at = self.runner.logprobs(wanted, targets), 0
        values = logprobs.tolist()
        for piece, _, r in scored:
            state, part = self._states[piece.sequence.request.id], slice(at, at + len(r))
            if count := piece.sequence.request.sampling.prompt_logprobs:
                logits = self.runner.logits(wanted[part])
                rows_top = top_logprobs(logits, logprobs[part], targets[part], [count] * len(r))
                state.scores += [d if isinstance(d, TokenLogprob) else TokenLogprob(d, ()) for d in rows_top.details()]
            else:
                state.scores += [TokenLogprob(value, ()) for value in values[part]]
            at = part.stop


def _scored_end(sequence: Sequence) -> int:
    """The number of positions after which all prompt logprobs are known: the last prompt token is only predicted."""
    return max(sequence.num_prompt - 1, 1)
