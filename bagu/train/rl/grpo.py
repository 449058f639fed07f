"""GRPO: the advantage of an answer is its reward relative to the other answers to the same prompt; there is no critic.

GRPO       normalization="sequence", scale=true, kl > 0                     https://arxiv.org/abs/2402.03300
DAPO       normalization="token", clip_high=0.28, dynamic_sampling=true     https://arxiv.org/abs/2503.14476
Dr. GRPO   normalization="fixed", scale=false                               https://arxiv.org/abs/2503.20783
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from bagu.config import ConfigError
from bagu.nn.model import Transformer
from bagu.train.loss import MicroBatchLoss
from bagu.train.objective import NO_MODELS
from bagu.train.rl.formulas import group_advantages, rewards_differ
from bagu.train.rl.policy_loss import PolicyLoss, PolicyTotals
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.rollout import Answer, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class GroupRelative(PolicyObjective):
    """`scale` divides the advantages of a group by the standard deviation of its rewards.

    A group whose rewards are all equal has no gradient: it is left out, and counted in `skipped_groups`. With
    `dynamic_sampling` other prompts take its place.
    """

    kind: Literal["grpo"] = "grpo"
    scale: bool = True
    dynamic_sampling: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 2:
            raise ConfigError(
                f"objective.samples is {self.samples}, and an answer is compared with others to its prompt",
                hint="at least 2; 8 is usual",
            )
        if self.kl > 0 and self.kl_estimator == "k1":
            raise ConfigError(
                "objective.kl_estimator is k1, and as a loss its expected gradient is 0",
                hint="use k2 or k3, or objective.kl=0",
            )

    @property
    def fills(self) -> bool:
        return self.dynamic_sampling

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> GroupRelativeLoss:
        return GroupRelativeLoss(self, model)


class GroupRelativeLoss(PolicyLoss):
    config: GroupRelative

    def useful(self, rewards: Sequence[float]) -> bool:
        return rewards_differ(rewards)

    def advantages(self, answers: Sequence[Answer]) -> list[Answer]:
        groups: dict[int, list[int]] = defaultdict(list)
        for index, answer in enumerate(answers):
            groups[answer.prompt].append(index)
        value = np.zeros(len(answers))
        for members in groups.values():
            value[members] = group_advantages([answers[i].reward for i in members], scale=self.config.scale)
        return [a.plus(advantages=np.full(a.tokens.num_targets, v)) for a, v in zip(answers, value, strict=True)]

    def __call__(self, model: Transformer, batch: RolloutBatch, totals: PolicyTotals) -> MicroBatchLoss:
        part = self.policy(model, batch, totals, kl=self.config.kl)
        return MicroBatchLoss(part.loss, part.metrics, part.peaks, part.output.expert_load)
