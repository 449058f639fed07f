"""What scores a sampled answer: the protocol between a rollout and a reward.

A reward is a function of the prompt, the completion and the facts of the prompt's row. `recipes/rewards.py` loads one:
a function of a user's file, a built-in one, or a trained reward model.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from bagu.config import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a reward sees of one sampled answer. `facts` are the other columns of the prompt's row, e.g. `name`.

    `prompt` is the last of `messages`, the chat that was answered; without messages it is the whole chat.
    """

    prompt: str
    completion: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The reward of one sample.

    `fault` is None if the reward function gave this value. Otherwise the value is the configured default, and `fault`
    says why in a few words ("raised ValueError", "timed out", "returned nan"): a run counts these. With `partly`,
    others of several rewards gave a value. `parts` are named contributions to the value, for reports.
    """

    reward: float
    fault: str | None = None
    partly: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RewardSpec:
    """One reward of a run as it is written: SPEC, or SPEC:WEIGHT."""

    spec: str
    weight: float = 1.0

    @classmethod
    def of(cls, text: str) -> Self:
        spec, _, weight = text.rpartition(":")
        if not spec or not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", weight) or Path(text).exists():
            return cls(spec=text)
        return cls(spec=spec, weight=float(weight))

    @property
    def name(self) -> str:
        """The name of its metrics, without folders."""
        return Path(self.spec).name


def reward_specs(reward: str | Sequence[str]) -> tuple[RewardSpec, ...]:
    """The rewards of a run, whose reward is their weighted sum."""
    found = tuple(map(RewardSpec.of, [reward] if isinstance(reward, str) else reward))
    names = [one.name for one in found]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(
            f"two rewards have the name {double!r}, and each is logged by its name", hint="rename one, or leave it out"
        )
    return found


class RewardFunction(Protocol):
    """Scores a batch of samples: one `Scored` each, in order. `reward` is finite, and the call does not raise for what
    a sample contains: a sample that cannot be scored has a fault."""

    @property
    def name(self) -> str: ...

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]: ...

    def close(self) -> None:
        """End the processes and free the memory that the reward uses."""
        ...
