"""A discrete-event model of the engine: the scheduler's rule, and a formula for the time of a step.

In each step every running sequence that has read its prompt generates one token, and the rest of the token budget goes
to prompts in order of arrival, in chunks. The last chunk of a prompt samples its first token. A free slot goes to the
first waiting request. Memory for the KV cache is unlimited here, and HTTP costs nothing.

What the steps do (`Schedule`) and how long they take are separate. A client of a closed loop sends its next request
when the last one ends, so its schedule does not depend on the times, and one schedule serves every formula.

Dims: S = steps, R = requests, D = formulas.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """What every step does, and which steps matter to each request."""

    steps: np.ndarray  # [S, 3]: the arguments of a StepTime
    arrivals: np.ndarray | None  # [R] seconds; None in a closed loop
    asked: np.ndarray  # [R]: the number of steps before the request is sent
    first: np.ndarray  # [R]: the step that samples its first token
    last: np.ndarray
    outputs: np.ndarray  # [R] tokens

    def latencies(self, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """TTFT [R, D], TPOT [R, D] and duration [D] for the times of the steps [S, D]."""
        ends = np.vstack([np.zeros((1, seconds.shape[1])), np.cumsum(seconds, axis=0)])
        if self.arrivals is None:
            asked = ends[self.asked]
        else:
            asked = self.arrivals[:, None]
            earliest = np.zeros(len(seconds))  # a step begins after the arrival of its requests
            np.maximum.at(earliest, self.asked, self.arrivals)
            for i in range(len(seconds)):
                ends[i + 1] = np.maximum(ends[i], earliest[i]) + seconds[i]
        first, last = ends[1:][self.first], ends[1:][self.last]
        return first - asked, (last - first) / np.maximum(self.outputs - 1, 1)[:, None], ends[-1]


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
    return samples_of(
        *schedule(jobs, step_s, slots=slots, step_tokens=step_tokens, clients=clients, arrivals=arrivals, cached=cached)
    )


def samples_of(found: Schedule, seconds: np.ndarray) -> Samples:
    """The latencies if the steps take `seconds` [S]."""
    ttft, tpot, duration = found.latencies(seconds[:, None])
    return Samples(ttft_s=tuple(ttft[:, 0].tolist()), tpot_s=tuple(tpot[:, 0].tolist()), duration_s=float(duration[0]))


def schedule(
    jobs: Sequence[tuple[int, int]],
    step_s: StepTime,
    *,
    slots: int,
    step_tokens: int,
    clients: int | None = None,
    arrivals: Sequence[float] | None = None,
    cached: int = 0,
) -> tuple[Schedule, np.ndarray]:
    """The schedule of `simulate`, and the seconds of its steps by `step_s`."""
    coming = deque(range(len(jobs)))  # not sent yet
    waiting: deque[int] = deque()
    left, made, seen = [p for p, _ in jobs], [0] * len(jobs), [0] * len(jobs)
    asked, first, last = [0] * len(jobs), [-1] * len(jobs), [0] * len(jobs)
    running: list[int] = []
    steps: list[tuple[int, int, int]] = []
    seconds: list[float] = []
    clock, done, in_flight = 0.0, 0, 0
    while done < len(jobs):
        while coming and (arrivals is None or arrivals[coming[0]] <= clock) and in_flight < (clients or len(jobs)):
            asked[coming[0]] = len(steps)
            waiting.append(coming.popleft())
            in_flight += 1
        if not waiting and not running:
            clock = max(clock, arrivals[coming[0]] if arrivals is not None else 0.0)
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
        steps.append((len(decodes), chunks, sum(seen[i] for i in running)))
        seconds.append(step_s(*steps[-1]))
        clock += seconds[-1]
        for i in decodes:
            made[i], seen[i] = made[i] + 1, seen[i] + 1
            if made[i] == 1:
                first[i] = len(steps) - 1
            if made[i] == jobs[i][1]:
                last[i], done, in_flight = len(steps) - 1, done + 1, in_flight - 1
        running = [i for i in running if made[i] < jobs[i][1]]
    found = Schedule(
        steps=np.array(steps),
        arrivals=None if arrivals is None else np.array(arrivals, dtype=float),
        asked=np.array(asked),
        first=np.array(first),
        last=np.array(last),
        outputs=np.array([n for _, n in jobs]),
    )
    return found, np.array(seconds)
