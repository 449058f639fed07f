"""The guard: checks a step's loss and gradient norm before the update, and refuses bad steps.

A value that is not finite is always refused. A spike is a value far above the recent ones by the robust z-score

    z = (x - median) / max(1.4826 MAD, floor)

over the last `window` accepted steps, for the loss and for the logarithm of the gradient norm (a positive quantity with
a heavy tail). Median and MAD (median absolute deviation) are robust to a few outliers, and the floors prevent that
small changes of a flat curve count as spikes. A falling value is never a spike.

A refused step changes only the position in the data. After `max_skips` in a row the loop rolls back to the last
checkpoint and continues with the data after the refused batches; after `max_rollbacks` it stops.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagu.errors import ArgumentError, BaguError

LOSS_FLOOR = 0.03  # of the median loss
NORM_FLOOR = 0.25  # of log(norm): with the default threshold, a norm below e² = 7.4 times the median is not a spike


class TrainingDiverged(BaguError, RuntimeError):
    """Training diverged, and rolling back did not help."""


@dataclass(frozen=True, kw_only=True)
class StabilityConfig:
    """`spike_threshold` is in robust standard deviations; None refuses only values that are not finite.

    No step counts as a spike before `min_history` steps are accepted.
    """

    spike_threshold: float | None = 8.0
    window: int = 128
    min_history: int = 32
    max_skips: int = 5
    max_rollbacks: int = 3

    def __post_init__(self) -> None:
        if self.spike_threshold is not None and self.spike_threshold <= 0:
            raise ArgumentError(f"spike_threshold is {self.spike_threshold}", hint="use null to look for no spikes")
        if not 2 <= self.min_history <= self.window:
            raise ArgumentError(
                f"min_history is {self.min_history} and window {self.window}", hint="2 <= min_history <= window"
            )
        if self.max_skips < 1 or self.max_rollbacks < 0:
            raise ArgumentError(
                f"max_skips is {self.max_skips} and max_rollbacks {self.max_rollbacks}",
                hint="at least 1 skip; 0 rollbacks stops where the first would be",
            )


def robust_z(value: float, history: Sequence[float], floor: float) -> float:
    """How many robust standard deviations `value` is above the median of `history`."""
    median = statistics.median(history)
    mad = statistics.median([abs(x - median) for x in history])
    return (value - median) / max(1.4826 * mad, floor)  # 1.4826 MAD is the standard deviation of a normal


class Guard:
    """Accepts or refuses steps. Its history is part of the checkpoint, so a resumed run decides the same."""

    def __init__(self, config: StabilityConfig) -> None:
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.window)
        self.log_norms: deque[float] = deque(maxlen=config.window)
        self.skips_in_a_row = 0
        self.rollbacks = 0

    @property
    def exhausted(self) -> bool:
        """Whether `max_skips` steps in a row were refused."""
        return self.skips_in_a_row >= self.config.max_skips

    def judge(self, loss: float, grad_norm: float) -> str | None:
        """The reason to refuse this step, or None. An accepted step is added to the history."""
        reason = self._objection(loss, grad_norm)
        if reason is None:
            self.skips_in_a_row = 0
            self.losses.append(loss)
            self.log_norms.append(_log(grad_norm))
        else:
            self.skips_in_a_row += 1
        return reason

    def _objection(self, loss: float, grad_norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"the gradient norm is {grad_norm}"
        limit = self.config.spike_threshold
        if limit is None or len(self.losses) < self.config.min_history:
            return None
        floor = LOSS_FLOOR * abs(statistics.median(self.losses)) or LOSS_FLOOR
        if (z := robust_z(loss, self.losses, floor)) > limit:
            return f"the loss {loss:.4g} is {z:.1f} robust standard deviations above the recent ones"
        if (z := robust_z(_log(grad_norm), self.log_norms, NORM_FLOOR)) > limit:
            return (
                f"the gradient norm {grad_norm:.4g} is {z:.1f} robust standard deviations (of its log) above the rest"
            )
        return None

    def state(self) -> dict[str, Any]:
        """The state as JSON, which preserves floats exactly."""
        return {
            "losses": list(self.losses),
            "log_norms": list(self.log_norms),
            "skips_in_a_row": self.skips_in_a_row,
            "rollbacks": self.rollbacks,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=self.config.window)
        self.log_norms = deque(state["log_norms"], maxlen=self.config.window)
        self.skips_in_a_row, self.rollbacks = state["skips_in_a_row"], state["rollbacks"]


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))  # a gradient of exactly zero is valid
