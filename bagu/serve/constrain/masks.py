"""The tokens that may follow in each constrained choice, as one bit mask per row of a step.

The state of a choice is a matcher and the number of tokens that it has consumed. It depends on the output alone, so
preemption and recomputing do not change it. Masks need the tokens of the previous step. On a GPU they are computed
after the forward is launched; on a CPU, where the tokens are known before the forward, in a thread beside it
(`Masks.start`).

A mask is never empty: where the output is complete, the tokens that end it are allowed, and nothing else if nothing can
follow. If the matcher reaches one of its limits, the choice fails (`Masks.failure`).

Dims: R = rows, W = words of 32 tokens, V = vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from bagu.machine.cores import available_cores
from bagu.serve.plan import Sequence
from bagu.serve.request import Request

__all__ = ["Masks", "apply_mask", "unpacked"]

MAX_THREADS = 8  # of llguidance; on a machine with two cores one


@dataclass(slots=True)
class _Choice:
    matcher: Any
    ends: np.ndarray  # tokens that may end a complete output
    stops: np.ndarray  # tokens that must not be sampled before min_tokens, or at all with ignore_eos
    until: float  # number of output tokens before which `stops` are avoided
    consumed: int = 0  # tokens of the output
    failure: str | None = None


class Masks:
    """The constrained choices of an engine. One thread at a time uses it."""

    def __init__(self, vocab_size: int, eos_ids: Seq[int]) -> None:
        self.vocab_size, self.eos_ids = vocab_size, tuple(eos_ids)
        self.mask_s = self.wait_s = 0.0  # computing masks; of that, what the engine's thread waits for
        self.requests = 0
        self._choices: dict[str, list[_Choice]] = {}  # by request
        self._failed: set[tuple[str, int]] = set()
        self._executor: Any = None
        self._thread: ThreadPoolExecutor | None = None
        self._started: Future[np.ndarray | None] | None = None

    def __bool__(self) -> bool:
        return bool(self._choices)

    def add(self, request: Request, matcher: Any, special: Collection[int]) -> None:
        """Add a request whose grammar is compiled to `matcher`. Of its stop tokens, those among `special` may end a
        complete output, like the end-of-text tokens: text cannot contain them."""
        s = request.sampling
        ends = [*self.eos_ids, *(t for t in s.stop_token_ids if t in special and t not in self.eos_ids)]
        stops = {*s.stop_token_ids, *self.eos_ids}
        until = float("inf") if s.ignore_eos else s.min_tokens
        inside, avoided = (np.array([t for t in ids if t < self.vocab_size]) for ids in (ends, sorted(stops)))
        self._choices[request.id] = [_Choice(matcher.deep_copy(), inside, avoided, until) for _ in range(s.n)]
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

    def start(self, sampled: Seq[Sequence]) -> None:
        """Begin to compute the masks of a step in another thread. All tokens of these sequences must be known."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._started = self._thread.submit(self._compute, list(sampled))

    def finish(self, sampled: Seq[Sequence]) -> np.ndarray | None:
        """The masks of a step: [R, W] int32, all ones in rows without a grammar; None if there is no such row. Uses the
        result of `start` if it was called for this step."""
        began = time.perf_counter()
        started, self._started = self._started, None
        masks = self._compute(sampled) if started is None else started.result()
        self.wait_s += time.perf_counter() - began
        return masks

    def discard(self) -> None:
        """Drop the result of `start`: the step will not be sampled."""
        started, self._started = self._started, None
        if started is not None:
            started.result()

    def _compute(self, sampled: Seq[Sequence]) -> np.ndarray | None:
        began = time.perf_counter()
        rows = [
            (row, s, self._choices[s.request.id][s.index]) for row, s in enumerate(sampled)
            if not s.finished and s.request.id in self._choices
        ]  # fmt: skip
        if not rows:
            return None
        for _, sequence, choice in rows:
            new = sequence.tokens[sequence.num_prompt + choice.consumed :]
            if new and choice.failure is None and not choice.matcher.consume_tokens(new):
                self._fail(sequence, choice)
            choice.consumed += len(new)
        masks = np.empty((len(sampled), -(-self.vocab_size // 32)), dtype=np.int32)
        going = [(row, sequence, choice) for row, sequence, choice in rows if choice.failure is None]
        free = np.ones(len(sampled), dtype=bool)
        free[[row for row, *_ in going]] = False
        masks[free] = -1
        if going:
            self._fill([(choice.matcher, row) for row, _, choice in going], masks)
            self._finish_rows(going, masks)
        self.mask_s += time.perf_counter() - began
        return masks

    def _fill(self, going: list[tuple[Any, int]], masks: np.ndarray) -> None:
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(max(1, min(MAX_THREADS, available_cores() // 2)))
        self._executor.unsafe_compute_mask_ptr(going, masks.ctypes.data, masks.shape[1] * 4, len(masks))

    def _finish_rows(self, going: Seq[tuple[int, Sequence, _Choice]], masks: np.ndarray) -> None:
        """Set the tokens that end an output, and find the choices that cannot go on."""
        for row, sequence, choice in going:
            if len(choice.ends) > 1 or sequence.num_output < choice.until:
                self._set_ends(masks[row], sequence, choice)
        some: np.ndarray = (masks != 0).any(1)  # one call for all rows: 32 calls take 0.2 ms
        for row, sequence, choice in going:
            if choice.matcher.is_error() or not some[row]:
                self._fail(sequence, choice)
                masks[row] = -1

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

    def _fail(self, sequence: Sequence, choice: _Choice) -> None:
        reason = choice.matcher.get_error().split("\n")[0] or "no token of the vocabulary can follow"
        choice.failure = f"the grammar cannot go on: {reason}"
        self._failed.add((sequence.request.id, sequence.index))


def _has(words: np.ndarray, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & 1)


def _set(words: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_or.at(words, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))


def _clear(words: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_and.at(words, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))


def apply_mask(logits: torch.Tensor, mask: np.ndarray, upload: Callable[..., list[torch.Tensor]]) -> torch.Tensor:
    """logits[R, V] with -inf where the mask [R, W] has no bit. `upload` copies arrays to a GPU without waiting."""
    V = logits.shape[1]
    if logits.device.type == "cpu":
        # 0 or -inf for each bit, 8 at a time: 0.15 ms for 32 rows of 8192 on a Neoverse-N1. torch.where takes 1.1 ms.
        terms = np.take(_terms_of_bytes(), mask.view(np.uint8), axis=0, mode="clip").reshape(len(mask), -1)
        return logits + torch.from_numpy(terms[:, :V])
    (words,) = upload(mask)
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
