"""The engine's statistics. The HTTP server's process reads them and does not import torch, so this file does not."""

import time
from collections import deque
from dataclasses import dataclass

WINDOW_S = 2.0  # tokens/s are averaged over this time


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot of the engine; counters start at 0 when the engine is created."""

    running: int  # choices
    waiting: int  # requests, and preempted choices
    batch_size: int  # sequences in the last step
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    block_map: str  # one character per block: u used, c cached, . free
    tokens_per_s: float  # generated (for an encoder: read) over the last WINDOW_S
    last_step_s: float  # duration of the last step
    steps: int
    generated_tokens: int
    preemptions: int
    prefix_queries: int  # tokens looked up in the prefix cache
    prefix_hits: int  # tokens found there
    drafts: int = 0  # drafts verified, each of one or more tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of draft_tokens
    constrained_requests: int = 0  # with a grammar
    grammar_compilations: int = 0
    grammar_compile_s: float = 0.0
    mask_s: float = 0.0  # work on token masks, by all threads
    mask_wait_s: float = 0.0  # the part of it that took time of the engine's thread
    not_finite: int = 0  # choices that ended because their adapter's probabilities are not finite
    forced_tokens: int = 0  # of generated_tokens: not sampled, since a grammar allowed no other
    images_encoded: int = 0
    images_reused: int = 0  # in steps, with vectors that were kept


class StepCounter:
    """Counts the steps of an engine and their tokens."""

    def __init__(self) -> None:
        self.steps = self.tokens = self.batch_size = 0
        self.forced_tokens = 0  # of `tokens`
        self.last_step_s = 0.0
        self._ended = 0.0
        self._recent: deque[tuple[float, int]] = deque()  # (end, tokens) of the steps in the last WINDOW_S

    def add(self, began: float, batch_size: int, tokens: int) -> float:
        """Count a step that began at `began` (time.perf_counter) and ends now. Returns its share of the time: if steps
        overlap, it starts when the previous step ended."""
        now = time.perf_counter()
        share, self._ended = now - max(began, self._ended), now
        self.last_step_s, self.batch_size = now - began, batch_size
        self.steps += 1
        self.tokens += tokens
        self._recent.append((now, tokens))
        self._forget(now)
        return share

    def tokens_per_s(self) -> float:
        self._forget(time.perf_counter())
        return sum(tokens for _, tokens in self._recent) / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
