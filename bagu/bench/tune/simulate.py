"""A discrete-event model of the engine: the scheduler's rule, and a formula for the time of a step.

In each step every running sequence that has read its prompt generates one token, and the rest of the token budget goes
to prompts in order of arrival, in chunks. The last chunk of a prompt samples its first token. A free slot goes to the
first waiting request. Memory for the KV cache is unlimited here, and HTTP costs nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Samples", "StepTime", "simulate"]

StepTime = Callable[[int, int, int], float]  # (decoded tokens, prompt tokens, tokens in the KV cache) -> seconds


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The latencies of the requests of one load: `ttft_s[i]` and `tpot_s[i]` (0 for one token) of request i, the
    seconds of the load, and how many requests failed."""

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    duration_s: float
    failed: int = 0

    def goodput(self, limits: Mapping[str, float]) -> float:
        """Requests per second within the limits, milliseconds by metric."""
        first, each = (limits.get(name, float("inf")) / 1e3 for name in ("ttft", "tpot"))
        good = sum(a <= first and b <= each for a, b in zip(self.ttft_s, self.tpot_s, strict=True))
        return good / self.duration_s if self.duration_s else 0.0


def simulate(
    jobs: Sequence[tuple[int, int]],
    step_s: StepTime,
    *,
    slots: int,
    step_tokens: int,
    clients: int | None = None,
    arrivals: Sequence[float] | None = None,
    cached: int = 0,
) -> Samples:
    """Serve `jobs`, each (prompt tokens, output tokens): a closed loop of `clients`, or at the times `arrivals`. The
    first `cached` tokens of every prompt but the first are in the prefix cache."""
    asked = [0.0] * len(jobs) if arrivals is None else list(arrivals)
    coming = deque(range(len(jobs)))  # not sent yet
    waiting: deque[int] = deque()
    left, made, seen = [p for p, _ in jobs], [0] * len(jobs), [0] * len(jobs)
    first, last = [0.0] * len(jobs), [0.0] * len(jobs)
    running: list[int] = []
    clock, done, in_flight = 0.0, 0, 0
    while done < len(jobs):
        while coming and (arrivals is None or asked[coming[0]] <= clock) and in_flight < (clients or len(jobs)):
            if arrivals is None:
                asked[coming[0]] = clock
            waiting.append(coming.popleft())
            in_flight += 1
        if not waiting and not running:
            clock = max(clock, asked[coming[0]])
            continue
        decodes = [i for i in running if left[i] == 0]
        budget, chunks = step_tokens - len(running), 0
        while waiting and len(running) < slots and budget > 0:
            i = waiting.popleft()
            hit = min(cached, left[i] - 1) if i else 0
            left[i], seen[i] = left[i] - hit, hit
            running.append(i)
            budget -= 1
        spare = step_tokens - len(decodes)
        for i in running:
            if left[i]:
                chunk = min(left[i], spare)
                left[i], seen[i], spare, chunks = left[i] - chunk, seen[i] + chunk, spare - chunk, chunks + chunk
                if chunk and left[i] == 0:
                    decodes.append(i)  # its last chunk samples a token
        clock += step_s(len(decodes), chunks, sum(seen[i] for i in running))
        for i in decodes:
            made[i], seen[i] = made[i] + 1, seen[i] + 1
            first[i] = first[i] or clock
            if made[i] == jobs[i][1]:
                last[i], done, in_flight = clock, done + 1, in_flight - 1
        running = [i for i in running if made[i] < jobs[i][1]]
    return Samples(
        ttft_s=tuple(f - a for f, a in zip(first, asked, strict=True)),
        tpot_s=tuple((b - a) / (n - 1) if n > 1 else 0.0 for a, b, (_, n) in zip(first, last, jobs, strict=True)),
        duration_s=clock,
    )
