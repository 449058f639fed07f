"""What scores a sampled answer: the protocol between a rollout and a reward.

A reward is a function of the prompt, the completion and the facts of the prompt's row. `recipes/rewards.py` loads one:
a function of a user's file, a built-in one, or a trained reward model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


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
    says why in a few words ("raised ValueError", "timed out", "returned nan"): a run counts these.
    `parts` are named contributions to the value, for reports.
    """

    reward: float
    fault: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class RewardFunction(Protocol):
    """Scores a batch of samples: one `Scored` each, in order. `reward` is finite, and the call does not raise for what
    a sample contains: a sample that cannot be scored has a fault."""

    @property
    def name(self) -> str: ...

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]: ...

    def close(self) -> None:
        """End the processes and free the memory that the reward uses."""
        ...
