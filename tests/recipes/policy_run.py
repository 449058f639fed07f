"""The small policy over eight letters that the tests of GRPO and PPO train, a reward, and an observer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagu.lab.parts import letters
from bagu.lab.parts.letters import CONTEXT, Letters, policy, prompts, sampler, source
from bagu.nn.model import Transformer
from bagu.train.rl.loader import RolloutLoader
from bagu.train.rl.policy_loss import PolicyLoss
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.reward_function import Sample, Scored

__all__ = ["CONTEXT", "Letters", "Notes", "Share", "policy", "prompts", "rollouts", "sampler", "source"]


class Share:
    """The share of the letter c in an answer."""

    name = "share of c"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        self.calls += 1
        return [Scored(reward=s.completion.count("c") / max(len(s.completion), 1)) for s in samples]

    def close(self) -> None:
        pass


class Notes:
    """An observer that keeps the metrics of the steps."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def on_step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        self.rows[step] = dict(metrics)

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        pass

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def rollouts(
    model: Transformer, objective: PolicyObjective, loss: PolicyLoss, *, reward: Any = None, **options: Any
) -> RolloutLoader:
    return letters.rollouts(model, objective, loss, reward or Share(), **options)
