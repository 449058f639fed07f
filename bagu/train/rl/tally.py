"""Counts over the answers of a rollout, and the metrics and curves that are made from them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bagu.runs.display import Curve
from bagu.train.rl.reward_function import Scored
from bagu.types import Completion

ANSWER_CURVES = (
    Curve(
        title="Entropy",
        unit="nats per token",
        metrics={"entropy_nats": "training", "val_entropy_nats": "validation"},
    ),
    Curve(
        title="Length of answers",
        unit="tokens",
        zero=True,
        metrics={"length_tokens": "training", "val_length_tokens": "validation"},
    ),
    Curve(title="Answers cut at max_tokens", unit="%", metrics={"truncated_percent": "cut"}, zero=True),
)


def part_metric(name: str) -> str:
    """The metric of a named part of the reward."""
    return f"reward_part_{name}"


@dataclass(kw_only=True)
class Tally:
    """Counts over all answers that were sampled for one rollout, also those that are left out."""

    rewards: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    logprob: float = 0.0
    truncated: int = 0
    faults: int = 0
    skipped_groups: int = 0
    rollout_s: float = 0.0
    reward_s: float = 0.0

    def add(self, completions: Sequence[Completion], scored: Sequence[Scored]) -> None:
        """Add answers and their scores; there are no scores without a reward."""
        self.rewards += [s.reward for s in scored]
        self.faults += sum(s.fault is not None for s in scored)
        for s in scored:
            for name, value in s.parts.items():
                self.parts.setdefault(name, []).append(value)
        self.lengths += [len(c.tokens) for c in completions]
        self.logprob += sum(sum(c.logprobs or ()) for c in completions)
        self.truncated += sum(c.finish == "length" for c in completions)

    def answer_metrics(self) -> dict[str, float]:
        """The metrics that held-out answers have too. The entropy is estimated: minus the mean logprob of the sampled
        tokens."""
        n, tokens = len(self.lengths), sum(self.lengths)
        values = {
            "length_tokens": tokens / n,
            "truncated_percent": 100 * self.truncated / n,
            "entropy_nats": -self.logprob / tokens,
        }
        if not self.rewards:
            return values
        return {
            "reward_mean": sum(self.rewards) / n,
            "reward_std": float(np.std(self.rewards)),
            **{part_metric(name): sum(part) / len(part) for name, part in sorted(self.parts.items())},
            **values,
            "reward_faults": self.faults,
        }

    def metrics(self) -> dict[str, float]:
        """The metrics of a rollout: those of its answers, the times of its phases, and the groups left out."""
        speed = sum(self.lengths) / max(self.rollout_s, 1e-9)
        values = {**self.answer_metrics(), "rollout_s": self.rollout_s, "rollout_tokens_per_s": speed}
        if not self.rewards:
            return values
        return {**values, "skipped_groups": self.skipped_groups, "reward_s": self.reward_s}
