"""How long steps take, as measured in this engine: by their number of tokens, with and without drafts.

The time of a step depends on the machine, the model, the batch, the contexts and, with a draft model, on the time to
draft. So it is not modelled but measured: the median of the last steps of about the same size. A size that was not seen
is taken to cost as much as the next smaller one that was, so that it is tried. Times of steps with drafts are forgotten
after a while: a few slow samples (a graph is captured, another process takes the cores) do not turn speculation off for
good.
"""

import math
from collections import deque
from statistics import median_low

KEPT = 8  # samples of a size
FEWEST = 3  # samples before their median counts: the first step of a size may include a compilation
FORGET_STEPS = 512


class StepTimes:
    def __init__(self) -> None:
        self._samples: dict[tuple[bool, int], deque[float]] = {}
        self._typical: dict[tuple[bool, int], float] = {}
        self._last: dict[tuple[bool, int], int] = {}  # the step of the last sample
        self._steps = 0

    def record(self, tokens: int, drafted: bool, seconds: float) -> None:
        key = (drafted, _size(tokens))
        self._steps += 1
        self._last[key] = self._steps
        samples = self._samples.setdefault(key, deque(maxlen=KEPT))
        samples.append(seconds)
        if len(samples) >= FEWEST:
            self._typical[key] = median_low(samples)

    def plain(self, tokens: int) -> float | None:
        """Seconds of a step of this many sequences without drafts; None before any was measured."""
        below = self._below(False, _size(tokens))
        return below if below is not None else min((t for (d, _), t in self._typical.items() if not d), default=None)

    def drafted(self, tokens: int, least: float) -> float:
        """Seconds of a step of this many tokens with drafts, at least `least`."""
        size = _size(tokens)
        if self._steps - self._last.get((True, size), self._steps) > FORGET_STEPS:
            del self._last[True, size], self._samples[True, size]
            self._typical.pop((True, size), None)
        known = self._typical.get((True, size))
        if known is not None:
            return max(known, least)
        return max(self._below(False, size) or 0.0, self._below(True, size) or 0.0, least)

    def _below(self, drafted: bool, size: int) -> float | None:
        """The time of the largest known size up to this one."""
        sizes = [s for d, s in self._typical if d == drafted and s <= size]
        return self._typical[drafted, max(sizes)] if sizes else None


def _size(tokens: int) -> int:
    """Sizes within about 10 % of each other count as one; small numbers stay different."""
    return round(4 * math.log2(max(tokens, 1)))
