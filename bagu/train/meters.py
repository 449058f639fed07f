"""The metrics row of a step: the metrics of its loss, and the cost of the step. Names end in their unit."""

import sys
import time
from collections import deque

import torch

from bagu.train.served.config import MOST_DELAY
from bagu.train.step import StepResult


class Meters:
    """Measures steps and creates the metrics row of each; a value that is not known is None.

    A step lasts from `start` (before its data is requested) to `row` (when its loss is known on the host); evaluation,
    sampling and saving are not part of it. On a GPU the update is still running then, and counts towards the next step.
    """

    def __init__(
        self, device: torch.device, *, flops_per_token: float | None = None, peak_flops: float | None = None
    ) -> None:
        self.device, self.flops_per_token, self.peak_flops = device, flops_per_token, peak_flops
        self._start = self._data_wait = 0.0
        self.seconds = 0.0  # of the last row's step
        self._last: deque[tuple[int, float]] = deque(maxlen=MOST_DELAY + 1)  # tokens and seconds of steps

    def start(self) -> None:
        self._start = time.perf_counter()

    def data_arrived(self) -> None:
        """Record that the micro-batches have arrived: the time since `start` was spent waiting for them."""
        self._data_wait = time.perf_counter() - self._start

    def row(self, result: StepResult, *, over: int = 1) -> dict[str, float | int | None]:
        """The row of a step, with the rate over the last `over` steps. With a delay, the results of several steps come
        at once: one alone would have a rate of millions of tokens/s."""
        self.seconds = time.perf_counter() - self._start
        tokens = result.totals.tokens
        self._last.append((tokens, self.seconds))
        last = list(self._last)[-over:]
        rate = sum(t for t, _ in last) / sum(s for _, s in last)
        row: dict[str, float | int | None] = {
            **result.metrics,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": tokens,
            "tokens_per_s": rate,
            "mfu_percent": None,
            "memory_bytes": peak_memory(self.device),
            "padding_percent": 100 * result.totals.padding / tokens if tokens else 0.0,
            "data_wait_s": self._data_wait,
        }
        if self.flops_per_token is not None and self.peak_flops is not None:
            row["mfu_percent"] = 100 * rate * self.flops_per_token / self.peak_flops
        return row


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes so far: allocated by torch on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes, but bytes on macOS
