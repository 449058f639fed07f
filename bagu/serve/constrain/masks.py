"""The tokens that may follow in each constrained choice, as one bit mask per row of a step.

The state of a choice is a matcher and the number of tokens that it has consumed. It depends on the output alone, so
preemption and recomputing do not change it. Masks need the tokens of the previous step. Where steps overlap, `start`
consumes these as soon as they are on the host and computes the masks in other threads, while the forward runs; else
`finish` computes them.

A mask is never empty: where the output is complete, the tokens that end it are allowed, and nothing else if nothing can
follow. If the matcher reaches one of its limits, the choice fails (`Masks.failure`).

Dims: R = rows, W = words of 32 tokens, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch

from bagu.machine.cores import available_cores
from bagu.serve.plan import Plan, Sequence
from bagu.serve.request import Request

__all__ = ["Masks", "apply_mask", "unpacked"]

MAX_THREADS = 8  # of llguidance


@dataclass(slots=True)
class _Choice:
    lexer: int  # matchers of a grammar with the same number share a lexer
    matcher: Any
    ends: np.ndarray  # tokens that may end a complete output
    stops: np.ndarray  # tokens that must not be sampled before min_tokens, or at all with ignore_eos
    until: float  # number of output tokens before which `stops` are avoided
    consumed: int = 0  # tokens of the output
    failure: str | None = None


class _Job(NamedTuple):
    """The masks of a plan."""

    plan: Plan
    rows: list[tuple[int, Sequence, _Choice]]  # the constrained ones
    masks: torch.Tensor  # [R, W] int32, on the host
    filled: Future[float] | None = None  # if another thread computes the masks


class Masks:
    """The constrained choices of an engine. One thread calls it."""

    def __init__(self, vocab_size: int, eos_ids: Seq[int], device: torch.device) -> None:
        self.vocab_size, self.eos_ids, self.device = vocab_size, tuple(eos_ids), device
        self.mask_s = self.wait_s = 0.0  # computing masks; of that, what the engine's thread waits for
        self.requests = 0
        self._choices: dict[str, list[_Choice]] = {}  # by request
        self._failed: set[tuple[str, int]] = set()
        cores = available_cores()
        self.threads = max(1, min(MAX_THREADS, cores // 2 if device.type == "cuda" else cores))
        self._executor: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._started: _Job | None = None

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
        self._choices[request.id] = [_Choice(lexer, matcher, inside, avoided, until) for lexer, matcher in matchers]
        self.requests += 1

    def remove(self, request_id: str) -> None:
        for index in range(len(self._choices.pop(request_id, ()))):
            self._failed.discard((request_id, index))

    @property
    def has_failures(self) -> bool:
        return bool(self._failed)

    def failure(self, request_id: str, index: int) -> str | None:
        """Why this choice cannot go on; its last token is not part of the output."""
        if (request_id, index) not in self._failed:
            return None
        return self._choices[request_id][index].failure

    def start(self, plan: Plan, previous: Seq[int]) -> None:
        """Begin to compute the masks of a plan in another thread. `previous` are the tokens that the plan before it
        sampled: of its tokens, those that are LATE in this one need not be committed yet."""
        self.discard()
        job = self._consume(plan, previous)
        if job is None:
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        entered = Event()
        self._started = job._replace(filled=self._thread.submit(self._fill, job, entered))
        entered.wait()  # else that thread gets the GIL only when this one waits for the masks

    def finish(self, plan: Plan) -> torch.Tensor | None:
        """The masks of a plan: [R, W] int32, all ones in rows without a grammar; None if there is no such row. Waits
        for the result of `start`, or computes them here if it was not called for this plan."""
        began = time.perf_counter()
        job, self._started = self._started, None
        if job is None or job.plan is not plan:
            job = self._consume(plan, ())
            if job is None:
                return None
        self.mask_s += self._fill(job) if job.filled is None else job.filled.result()
        self._finish_rows(job)
        self.wait_s += time.perf_counter() - began
        return job.masks

    def discard(self) -> None:
        """Drop the result of `start`: the step will not be sampled."""
        job, self._started = self._started, None
        if job is not None and job.filled is not None:
            job.filled.result()

    def _consume(self, plan: Plan, previous: Seq[int]) -> _Job | None:
        """Advance the matchers by the tokens that are new; None if the plan samples no constrained choice."""
        began, late = time.perf_counter(), dict(plan.late) if previous else {}
        rows = [
            (row, s, self._choices[s.request.id][s.index]) for row, s in enumerate(plan.sampled)
            if not s.finished and s.request.id in self._choices
        ]  # fmt: skip
        if not rows:
            return None
        for row, sequence, choice in rows:
            new = sequence.tokens[sequence.num_prompt + choice.consumed :]
            if (at := late.get(plan.sample_rows[row])) is not None:
                new.append(previous[at])
            if new and choice.failure is None and not choice.matcher.consume_tokens(new):
                choice.failure = _failure(choice.matcher)
            choice.consumed += len(new)
        shape = len(plan.sampled), -(-self.vocab_size // 32)
        masks = torch.empty(shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.mask_s += time.perf_counter() - began
        return _Job(plan, rows, masks)

    def _fill(self, job: _Job, entered: Event | None = None) -> float:
        """Compute the masks of the rows; returns the seconds that it took. Needs the GIL only to begin and to end."""
        if entered is not None:
            entered.set()  # the thread that waits for it goes on when this one gives up the GIL
        began = time.perf_counter()
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(self.threads)
        # In order of their lexers: each thread takes a range of the list, and waits where another uses the same lexer.
        rows = sorted(job.rows, key=lambda r: r[2].lexer)
        going = [(choice.matcher, row) for row, _, choice in rows if choice.failure is None]
        if going:  # llguidance raises for an empty list
            words = job.masks.shape[1]
            self._executor.unsafe_compute_mask_ptr(going, job.masks.data_ptr(), words * 4, len(job.masks))
        return time.perf_counter() - began

    def _finish_rows(self, job: _Job) -> None:
        """Set the tokens that end an output, and fail the choices that cannot go on. Choices that have finished since
        `start` are left as they are."""
        masks = job.masks.numpy()
        constrained = np.zeros(len(masks), dtype=bool)
        constrained[[row for row, *_ in job.rows]] = True
        if not constrained.all():
            masks[~constrained] = -1
        for row, sequence, choice in job.rows:
            if choice.failure is None and (len(choice.ends) > 1 or sequence.num_output < choice.until):
                self._set_ends(masks[row], sequence, choice)
        some: np.ndarray = (masks != 0).any(1)  # one call for all rows: 32 calls take 0.2 ms
        for row, sequence, choice in job.rows:
            if choice.failure is None and (choice.matcher.is_error() or not some[row]):
                choice.failure = _failure(choice.matcher)
            if choice.failure is not None:
                masks[row] = -1
                if not sequence.finished:
                    self._failed.add((sequence.request.id, sequence.index))

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


def _failure(matcher: Any) -> str:
    reason = matcher.get_error().split("\n")[0] or "no token of the vocabulary can follow"
    return f"the grammar cannot go on: {reason}"


def _has(words: np.ndarray, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & 1)


def _set(words: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_or.at(words, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))


def _clear(words: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_and.at(words, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))


def apply_mask(logits: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """logits[R, V] with -inf where the mask [R, W] has no bit. The mask is on the host, for a GPU in pinned memory."""
    V = logits.shape[1]
    if logits.device.type == "cpu":
        # 0 or -inf for each bit, 8 at a time: 0.15 ms for 32 rows of 8192 on a Neoverse-N1. torch.where takes 1.1 ms.
        terms = np.take(_terms_of_bytes(), mask.numpy().view(np.uint8), axis=0, mode="clip").reshape(len(mask), -1)
        return logits + torch.from_numpy(terms[:, :V])
    words = mask.to(logits.device, non_blocking=True)
    return torch.where(unpacked(words, V), logits, -torch.inf)


@cache
def _terms_of_bytes() -> np.ndarray:
    """[256, 8] fp32: for each bit of a byte, lowest first, 0 if it is set and -inf if not."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(0), np.float32(-np.inf))


def unpacked(words: torch.Tensor, V: int) -> torch.Tensor:
    """The bits of words[R, W] as bools [R, V], on their device."""
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=words.device)  # not a copy, which would wait for the forward
    return (words.view(torch.uint8).unsqueeze(-1) & bits).view(len(words), -1)[:, :V] != 0
