"""The tokens that may follow in each constrained choice, as one bit mask per row of a step.

The state of a choice is a matcher that has consumed its output. It depends on the output alone, so preemption and
recomputing do not change it. `advance` consumes the tokens of a step when they are on the host, and begins the next
masks: for a GPU other threads compute them during the next step, for a CPU they are computed at once.

Where only one text can follow, such as the key of an object, its tokens are forced: a mask would allow only them, one
after another, so the output is the same. `advance` returns them, and the next step computes them together.

A mask is never empty: where the output is complete, the tokens that end it are allowed, and nothing else if nothing can
follow. If the matcher reaches one of its limits, the choice fails (`Masks.failure`).

Dims: R = rows of a step, W = words of 32 tokens.
"""

import time
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from bagu.machine.cores import available_cores
from bagu.serve.constrain.mask_thread import MaskThread
from bagu.serve.plan import SHORT, Plan, Sequence
from bagu.serve.request import Request

Wait = Callable[[], float]  # returns the seconds that the masks took, the first time
MAX_THREADS = 8  # of llguidance
MOST_FORCED = SHORT - 1  # tokens that are forced at once: the next step computes them and the sampled one before them
FEWEST_ROWS = 64  # of the memory of masks


@dataclass(slots=True)
class _Choice:
    lexer: int  # matchers of a grammar with the same number share a lexer
    matcher: Any
    ends: np.ndarray  # tokens that may end a complete output
    stops: np.ndarray  # tokens that must not be sampled before min_tokens, or at all with ignore_eos
    until: float  # number of output tokens before which `stops` are avoided
    scored: bool  # the request asks for logprobs, so every token needs a step
    row: int  # of its mask in the memory
    wait: Wait | None = None  # for its next mask; None: that is not started


class Masks:
    """The constrained choices of an engine. One thread calls it."""

    def __init__(self, vocab_size: int, eos_ids: Seq[int], device: torch.device) -> None:
        self.vocab_size, self.eos_ids = vocab_size, tuple(eos_ids)
        # Work on masks; of that, what takes time of the engine's thread: its own work, and waiting for other threads.
        self.mask_s = self.wait_s = 0.0
        self.requests = 0
        self._choices: dict[str, list[_Choice]] = {}  # by request
        self._failures: dict[tuple[str, int], str] = {}
        self._pinned = device.type == "cuda"
        self.threads = max(1, min(MAX_THREADS, available_cores() // 2)) if self._pinned else 1
        self._memory = np.empty((0, -(-vocab_size // 32)), dtype=np.int32)  # a mask of each choice
        self._free_rows: list[int] = []
        self._removed: list[_Choice] = []  # a thread may still write their masks
        self._upload = torch.empty(self._memory.shape, dtype=torch.int32)  # the masks of a step
        self._executor: Any = None
        self._thread: MaskThread | None = None

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
            _Choice(lexer, matcher, inside, avoided, until, scored, self._new_row()) for lexer, matcher in matchers
        ]
        self.requests += 1

    def remove(self, request_id: str) -> None:
        for index, choice in enumerate(self._choices.pop(request_id, ())):
            if choice.wait is None or self._thread is None:
                self._free_rows.append(choice.row)
            else:
                self._removed.append(choice)
            self._failures.pop((request_id, index), None)

    @property
    def has_failures(self) -> bool:
        return bool(self._failures)

    def failure(self, request_id: str, index: int) -> str | None:
        """Why this choice cannot go on; its last token is not part of the output."""
        return self._failures.get((request_id, index))

    def advance(self, plan: Plan, tokens: Seq[int]) -> dict[Sequence, list[int]]:
        """Consume the tokens that a plan sampled, and those that must follow them; returns the latter. Begins the next
        masks. A matcher that cannot consume a token is in an error state afterwards."""
        began, going, forced = time.perf_counter(), [], {}
        for row, sequence, choice in self._constrained(plan.sampled):
            if tokens[row] not in sequence.stops:
                going.append(choice)
                if following := self._consume(choice, tokens[row]):
                    forced[sequence] = following
        self._add_own_work(time.perf_counter() - began)
        self._begin(going)
        return forced

    def start(self, plan: Plan) -> None:
        """Begin the masks of a plan that `advance` has not begun: those of first tokens."""
        self._begin([choice for _, _, choice in self._constrained(plan.sampled) if choice.wait is None])

    def finish(self, plan: Plan) -> torch.Tensor | None:
        """The masks of a plan, when they are computed: [R, W] int32, all ones in rows without a grammar; None if no row
        has one. Valid until the next call."""
        rows = list(self._constrained(plan.sampled))
        if not rows:
            return None
        for _, _, choice in rows:
            self._wait(choice)
            choice.wait = None
        began = time.perf_counter()
        masks = self._gather(len(plan.sampled), [row for row, _, _ in rows], [choice.row for _, _, choice in rows])
        for row, sequence, choice in rows:
            self._finish_row(masks[row], sequence, choice)
        self._add_own_work(time.perf_counter() - began)
        return masks

    def _consume(self, choice: _Choice, token: int) -> list[int]:
        """Consume a sampled token, and those that it forces; returns the latter."""
        choice.matcher.consume_token(token)
        if choice.scored:
            return []
        following: list[int] = choice.matcher.compute_ff_tokens()[:MOST_FORCED]
        if following:
            choice.matcher.consume_tokens(following)
        return following

    def _begin(self, choices: Seq[_Choice]) -> None:
        """Begin to compute the next masks of these choices; on a CPU compute them."""
        if not choices:
            return
        wait: Wait = _no_wait
        if self.threads == 1:
            self._add_own_work(self._compute(choices))
        else:
            if self._thread is None:
                from llguidance import LLExecutor

                self._thread, self._executor = MaskThread(), LLExecutor(self.threads)
            wait = self._thread.start(partial(self._compute_parallel, choices))
        for choice in choices:
            choice.wait = wait

    def _constrained(self, sequences: Seq[Sequence]) -> Iterator[tuple[int, Sequence, _Choice]]:
        """Those that have a grammar and go on, with their index."""
        for row, sequence in enumerate(sequences):
            choices = self._choices.get(sequence.request.id)
            if choices is not None and not sequence.finished:
                yield row, sequence, choices[sequence.index]

    def _new_row(self) -> int:
        if not self._free_rows:
            for choice in self._removed:
                self._wait(choice)
                self._free_rows.append(choice.row)
            self._removed = []
        if not self._free_rows:
            for choices in self._choices.values():  # a thread may write to the old memory
                for choice in choices:
                    self._wait(choice)
            old, size = self._memory, len(self._memory)
            self._memory = np.empty((max(2 * size, FEWEST_ROWS), old.shape[1]), dtype=np.int32)
            self._memory[:size] = old
            self._free_rows = list(range(size, len(self._memory)))
        return self._free_rows.pop()

    def _gather(self, count: int, rows: list[int], places: list[int]) -> torch.Tensor:
        """[count, W]: the masks at `places` of the memory in `rows`, ones in the others. For a GPU in pinned memory,
        the same for every step: the copy of a mask to a GPU is complete when the tokens that were sampled with it are
        on the host, and these are read before the next step is sampled.

        NumPy copies with this thread alone: PyTorch would wake all threads of OpenMP, while others compute masks. On
        the 16 cores of an H200's host that took 3.4 ms for 16 masks of 151,936 tokens."""
        if len(self._upload) < count:
            self._upload = torch.empty(count, self._memory.shape[1], dtype=torch.int32, pin_memory=self._pinned)
        masks = self._upload[:count]
        into = masks.numpy()
        if len(rows) < count:
            into.fill(-1)
        for row, place in zip(rows, places, strict=True):
            into[row] = self._memory[place]
        return masks

    def _wait(self, choice: _Choice) -> None:
        """Wait until the mask of a choice is computed, if another thread does that."""
        if choice.wait is not None and self._thread is not None:
            began = time.perf_counter()
            self.mask_s += choice.wait()
            self.wait_s += time.perf_counter() - began

    def _add_own_work(self, seconds: float) -> None:
        self.mask_s += seconds
        self.wait_s += seconds

    def _compute(self, choices: Seq[_Choice]) -> float:
        """Compute masks one after another; returns the seconds that it took. For a CPU: there 32 masks of 8192 tokens
        take 0.75 ms in this thread, 0.94 in another one, and with two threads between 0.70 and 1.03."""
        began, at, size = time.perf_counter(), self._memory.ctypes.data, 4 * self._memory.shape[1]
        for choice in choices:
            choice.matcher.unsafe_compute_mask_ptr(at + choice.row * size, size)
        return time.perf_counter() - began

    def _compute_parallel(self, choices: Seq[_Choice]) -> float:
        """As `_compute`, with several threads. Each takes a range of the list, and waits where another one uses the
        same lexer; so the list is in the order of the lexers."""
        began, memory = time.perf_counter(), self._memory
        going = [(choice.matcher, choice.row) for choice in sorted(choices, key=lambda choice: choice.lexer)]
        self._executor.unsafe_compute_mask_ptr(going, memory.ctypes.data, 4 * memory.shape[1], len(memory))
        return time.perf_counter() - began

    def _finish_row(self, mask: torch.Tensor, sequence: Sequence, choice: _Choice) -> None:
        """Set the tokens that end an output, and fail a choice that cannot go on: llguidance reports an error also
        where no token can follow."""
        if choice.matcher.is_error():
            reason = choice.matcher.get_error().split("\n")[0]
            self._failures[sequence.request.id, sequence.index] = f"the grammar cannot go on: {reason}"
            mask.fill_(-1)
        elif len(choice.ends) > 1 or sequence.num_output < choice.until:
            self._set_ends(mask.numpy(), sequence, choice)

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


def _no_wait() -> float:
    return 0.0


def _has(words: np.ndarray, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & 1)


def _set(words: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_or.at(words, tokens >> 5, np.uint32(1) << (tokens & 31).astype(np.uint32))


def _clear(words: np.ndarray, tokens: np.ndarray) -> None:
    np.bitwise_and.at(words, tokens >> 5, ~(np.uint32(1) << (tokens & 31).astype(np.uint32)))
