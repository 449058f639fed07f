"""The best evaluation so far: it marks the checkpoint to keep, and ends a run that no longer improves.

Names as in Hugging Face's trainer: `metric_for_best_model`, `greater_is_better`, `early_stopping_patience`,
`early_stopping_threshold`, `load_best_model_at_end`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bagu.errors import ArgumentError
from bagu.train.loss import Loss

LOWER = ("loss", "nats", "bits_per_byte", "perplexity")  # parts of names of metrics of which the lowest is the best


@dataclass(frozen=True, kw_only=True)
class BestConfig:
    """How evaluations are compared. `metric` is the name of a logged metric, such as val_loss_nats or
    task_continue4_accuracy_percent; null is the validation metric of the objective. `greater_is_better`: null decides
    by the name, in which loss, nats, bits_per_byte or perplexity mean that lower is better.

    The run ends after `patience` evaluations in a row that are not better than the best one by more than `threshold`;
    null never ends it. With `load_at_end` the run ends with the weights of the best checkpoint, not with the last ones.
    """

    metric: str | None = None
    greater_is_better: bool | None = None
    patience: int | None = None
    threshold: float = 0.0
    load_at_end: bool = False

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise ArgumentError(f"best.patience is {self.patience}", hint="at least 1, or null")
        if not 0 <= self.threshold < math.inf:
            raise ArgumentError(f"best.threshold is {self.threshold}", hint="0 or more")
        if self.metric is None and self.greater_is_better is not None:
            raise ArgumentError("best.greater_is_better is set without best.metric", hint="name the metric")


class Best:
    """Compares evaluations by their score, of which the lowest is the best. `waited` counts those since the best."""

    def __init__(self, config: BestConfig, loss: Loss[Any, Any]) -> None:
        self.config, self.loss = config, loss
        self.score: float | None = None
        self.step, self.waited = 0, 0

    @property
    def metric(self) -> str:
        return self.config.metric or self.loss.validation_metric

    @property
    def _sign(self) -> float:
        if self.config.metric is None:
            return -1.0 if self.loss.higher_is_better else 1.0
        greater = self.config.greater_is_better
        return -1.0 if (not any(w in self.metric for w in LOWER) if greater is None else greater) else 1.0

    def score_of(self, row: Mapping[str, float | int | None]) -> float | None:
        """The number by which checkpoints are compared; None if `row` has no evaluation."""
        value = row.get(self.metric)
        return None if value is None else self._sign * value

    def evaluated(self, row: Mapping[str, float | int | None], step: int) -> None:
        """Compare the evaluation after `step` steps with the best one."""
        if self.config.metric is not None and self.metric not in row:
            found = ", ".join(name for name in row if name.startswith(("val_", "task_")))
            raise ArgumentError(
                f"train.best.metric is {self.metric}, and the evaluation has no such metric", hint=f"it has: {found}"
            )
        score = self.score_of(row)
        if score is not None and (self.score is None or score < self.score - self.config.threshold):
            self.score, self.step, self.waited = score, step, 0
        else:
            self.waited += 1

    @property
    def ended(self) -> dict[str, float | int | str] | None:
        """Why the run ends, as facts of an event; None: it goes on."""
        if self.config.patience is None or self.waited < self.config.patience or self.score is None:
            return None
        return {
            "metric": self.metric,
            "best": self._sign * self.score,
            "best_step": self.step,
            "evaluations_since": self.waited,
        }

    def state(self) -> dict[str, Any]:
        return {"metric": self.metric, "score": self.score, "step": self.step, "waited": self.waited}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; after a change of the metric, start anew."""
        if state.get("metric") == self.metric:
            self.score, self.step, self.waited = state["score"], state["step"], state["waited"]
