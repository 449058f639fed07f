"""The tokens that may follow in each constrained choice, as one bit mask per row of a step.

The state of a choice is a matcher that has consumed its output. It depends on the output alone, so preemption and
recomputing do not change it. `advance` consumes the tokens of a step as soon as they are on the host. `start` begins
the masks of the next one: for a GPU other threads compute them while the forward runs, for a CPU they are computed
before it.

Where only one text can follow, such as the key of an object, its tokens are forced: a mask would allow only them, one
after another, so the output is the same. `advance` returns them, and the next step computes them together.

A mask is never empty: where the output is complete, the tokens that end it are allowed, and nothing else if nothing can
follow. If the matcher reaches one of its limits, the choice fails (`Masks.failure`).

Dims: R = rows, W = words of 32 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from bagu.machine.cores import available_cores
from bagu.serve.constrain.mask_thread import MaskThread
from bagu.serve.plan import SHORT, Plan, Sequence
from bagu.serve.request import Request

__all__ = ["Masks"]

MAX_THREADS = 8  # of llguidance
# Tokens that are forced at once. The next step computes them, and the sampled one before them if it is not in flight.
MOST_FORCED = SHORT - 1


@dataclass(slots=True)
class _Choice:
    lexer: int  # matchers of a grammar with the same number share a lexer
    matcher: Any
    ends: np.ndarray  # tokens that may end a complete output
    stops: np.ndarray  # tokens that must not be sampled before min_tokens, or at all with ignore_eos
    until: float  # number of output tokens before which `stops` are avoided
    scored: bool  # the request asks for logprobs, so every token needs a step


class _Job(NamedTuple):
    """The masks of a plan."""

    plan: Plan
    rows: list[tuple[int, Sequence, _Choice]]  # the constrained ones
    masks: torch.Tensor  # [R, W] int32, on the host


class Masks:
    """The constrained choices of an engine. One thread calls it."""

    def __init__(self, vocab_size: int, eos_ids: Seq[int], device: torch.device) -> None:
        self.vocab_size, self.eos_ids = vocab_size, tuple(eos_ids)
        self.mask_s = self.wait_s = 0.0  # computing masks; of that, what the engine's thread waits for
        self.requests = self.forced_tokens = 0
        self._choices: dict[str, list[_Choice]] = {}  # by request
        self._failures: dict[tuple[str, int], str] = {}
        self._pinned = device.type == "cuda"
        self.threads = max(1, min(MAX_THREADS, available_cores() // 2)) if self._pinned else 1
        self._buffer = self._masks = torch.empty(0, 0, dtype=torch.int32)
        self._executor: Any = None
        self._thread: MaskThread | None = None
        self._started: _Job | None = None
        self._running = False  # whether the thread computes the masks of `_started`

    def __bool__(self) -> bool:
        return bool(self._choices)

    def add(self, request: Request, matchers: Seq[tuple[int, Any]], special: Collection[int]) -> None:
        """Add a request with the number of a lexer and a matcher for each choice. Of its stop tokens, those among
        `special` may end a complete output, like the end-of-text tokens: text cannot contain them."""
        s = request.sampling
        ends = [*self.eos_ids, *(t for t in s.stop_token_ids if t in special and t not in self.eos_ids)]
        stops = {*s.stop_token_ids, *self.eos_ids}
        until = float("inf") if s.ignore_eos else s.min_tokens
        inside, avoided = (np.array([t for t in ids if t < self.vocab_size]) for ids in (ends, sorted(stops)))
        scored = s.logprobs is not None
        self._choices[request.id] = [
            _Choice(lexer, matcher, inside, avoided, until, scored) for lexer, matcher in matchers
        ]
        self.requests += 1

    def remove(self, request_id: str) -> None:
        for index in range(len(self._choices.pop(request_id, ()))):
            self._failures.pop((request_id, index), None)

    @property
    def has_failures(self) -> bool:
        return bool(self._failures)

    def failure(self, request_id: str, index: int) -> str | None:
        """Why this choice cannot go on; its last token is not part of the output."""
        return self._failures.get((request_id, index))

    def advance(self, plan: Plan, tokens: Seq[int]) -> dict[Sequence, list[int]]:
        """Consume the tokens that a plan sampled, and those that must follow them; returns the latter. A matcher that
        cannot consume a token is in an error state afterwards."""
        began, forced = time.perf_counter(), {}
        for sequence, token in zip(plan.sampled, tokens, strict=True):
            choices = self._choices.get(sequence.request.id)
            if choices is None or sequence.finished or sequence.skipped or token in sequence.stops:
                continue
            choice = choices[sequence.index]
            choice.matcher.consume_token(token)
            if not choice.scored and (following := choice.matcher.compute_ff_tokens()):
                forced[sequence] = following[:MOST_FORCED]
                choice.matcher.consume_tokens(forced[sequence])
                self.forced_tokens += len(forced[sequence])
        self.mask_s += time.perf_counter() - began
        return forced

    def start(self, plan: Plan, skipped: Collection[Sequence] = ()) -> None:
        """Begin to compute the masks of a plan, on a CPU compute them. All tokens before its samples are consumed. The
        samples of the sequences `skipped` are not used, and get no mask."""
        self.discard()
        self._started = job = self._job(plan, skipped)
        if job is None:
            return
        if self.threads == 1:
            seconds = self._compute(job)
            self.mask_s += seconds
            self.wait_s += seconds
            return
        if self._thread is None:
            from llguidance import LLExecutor

            self._thread, self._executor = MaskThread(), LLExecutor(self.threads)
        self._thread.start(partial(self._compute_parallel, job))
        self._running = True

    def finish(self, plan: Plan) -> torch.Tensor | None:
        """The masks of a plan that `start` got: [R, W] int32, all ones in rows without a grammar; None if no row has
        one. Valid until the next `start`."""
        began = time.perf_counter()
        job = self._started
        self.discard()
        if job is None or job.plan is not plan:  # another plan's masks are left if all its choices were aborted
            return None
        self._finish_rows(job)
        self.wait_s += time.perf_counter() - began
        return job.masks

    def discard(self) -> None:
        """Wait for what `start` began. Without `finish` the masks are not used."""
        self._started = None
        if self._running and self._thread is not None:
            self._running = False
            self.mask_s += self._thread.result()

    def _job(self, plan: Plan, skipped: Collection[Sequence]) -> _Job | None:
        """What is to be computed for a plan; None if it samples no constrained choice."""
        began, rows = time.perf_counter(), []
        for row, sequence in enumerate(plan.sampled):
            choices = self._choices.get(sequence.request.id)
            if choices is not None and not sequence.finished and sequence not in skipped:
                rows.append((row, sequence, choices[sequence.index]))
        if not rows:
            return None
        masks = self._memory(len(plan.sampled))
        if len(rows) < len(plan.sampled):
            masks.fill_(-1)
        self.mask_s += time.perf_counter() - began
        return _Job(plan, rows, masks)

    def _memory(self, rows: int) -> torch.Tensor:
        """[rows, W] int32, for a GPU in pinned memory. The same for every step: the copy of a mask to a GPU is complete
        when the tokens that were sampled with it are on the host, and the next masks need these."""
        if len(self._masks) != rows:
            if len(self._buffer) < rows:
                shape = rows, -(-self.vocab_size // 32)
                self._buffer = torch.empty(shape, dtype=torch.int32, pin_memory=self._pinned)
            self._masks = self._buffer[:rows]
        return self._masks

    def _compute(self, job: _Job) -> float:
        """Compute the masks one after another; returns the seconds that it took. For a CPU: there 32 masks of 8192
        tokens take 0.75 ms in this thread, 0.94 in another one, and with two threads between 0.70 and 1.03."""
        began, at, size = time.perf_counter(), job.masks.data_ptr(), 4 * job.masks.shape[1]
        for row, _, choice in job.rows:
            choice.matcher.unsafe_compute_mask_ptr(at + row * size, size)
        return time.perf_counter() - began

    def _compute_parallel(self, job: _Job) -> float:
        """As `_compute`, with several threads. Each takes a range of the list, and waits where another one uses the
        same lexer; so the list is in the order of the lexers."""
        began, size = time.perf_counter(), 4 * job.masks.shape[1]
        going = [(choice.matcher, row) for row, _, choice in sorted(job.rows, key=lambda r: r[2].lexer)]
        self._executor.unsafe_compute_mask_ptr(going, job.masks.data_ptr(), size, len(job.masks))
        return time.perf_counter() - began

    def _finish_rows(self, job: _Job) -> None:
        """Set the tokens that end an output, and fail the choices that cannot go on: llguidance reports an error also
        where no token can follow. Choices that have finished since `start` are left as they are."""
        masks = job.masks.numpy()
        for row, sequence, choice in job.rows:
            if sequence.finished:
                continue
            if choice.matcher.is_error():
                reason = choice.matcher.get_error().split("\n")[0]
                self._failures[sequence.request.id, sequence.index] = f"the grammar cannot go on: {reason}"
                masks[row] = -1
            elif len(choice.ends) > 1 or sequence.num_output < choice.until:
                self._set_ends(masks[row], sequence, choice)

    def _set_ends(self, mask: np.ndarray, sequence: Sequence, choice: _Choice) -> None:
        """Allow every end where the end of text is allowed; avoid stop tokens before min_tokens where others remain."""
        words = mask.view(np.uint32)
        if len(choice.ends) > 1 and _has(words, choice.ends[0]):
            _set(words, choice.ends)
        if sequence.num_output < choice.until:
            others = words.copy()
            _clear(others, choice.stops)
            if others.any():
                words[:] = others


def _has(words: np.ndarray, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & 1)


def _set(words: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_or.at(words, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))


def _clear(words: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_and.at(words, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
