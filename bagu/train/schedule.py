"""Learning-rate schedules: pure functions of the step, as a fraction of the peak.

Each starts with a linear warm-up. cosine and linear decay from the end of the warm-up to the last step; wsd (warm-up,
stable, decay) stays at the peak and decays only over the last `decay_share` of the run, by 1 - √progress, which had the
lowest final loss of the shapes in https://arxiv.org/abs/2405.18392; constant does not decay. All others end at `final`
of the peak.
"""

import math
from dataclasses import dataclass
from typing import Literal

from bagu.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """`decay_share` applies only to wsd (0.2 by default); constant has no `final`."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    final: float | None = None
    decay_share: float | None = None

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ArgumentError(f"warmup_steps is {self.warmup_steps}", hint="0 is no warm-up")
        if self.decay_share is not None and self.kind != "wsd":
            raise ArgumentError(f"decay_share is set, and {self.kind} has none", hint="it belongs to kind='wsd'")
        if self.final is not None and self.kind == "constant":
            raise ArgumentError("final is set, and a constant schedule stays at the peak", hint="leave final out")
        if self.final is not None and not 0 <= self.final <= 1:
            raise ArgumentError(f"final is {self.final}", hint="it is a share of the peak, between 0 and 1")
        if self.decay_share is not None and not 0 < self.decay_share <= 1:
            raise ArgumentError(f"decay_share is {self.decay_share}", hint="it is a share of the run, 0 < x <= 1")


def factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """The fraction of the peak learning rate for update `step` (from 0) of a run of `steps`.

    The last step of the warm-up has the full peak. The decay reaches `final` one step after the last step of the run,
    so that a `final` of 0 wastes no update. A run shorter than its warm-up never reaches the peak.
    """
    warmup = config.warmup_steps
    if step < warmup:
        return (step + 1) / warmup
    final = config.final or 0.0
    if config.kind == "constant":
        return 1.0
    start = max(warmup - 1, 0)
    if config.kind == "wsd":
        share = 0.2 if config.decay_share is None else config.decay_share
        start = max(start, steps - max(1, round(share * steps)))
    progress = min(1.0, max(0.0, (step - start) / max(1, steps - start)))
    if config.kind == "cosine":
        left = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.kind == "linear":
        left = 1 - progress
    else:
        left = 1 - math.sqrt(progress)
    return final + (1 - final) * left
