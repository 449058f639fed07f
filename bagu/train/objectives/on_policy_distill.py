"""On-policy distillation: a student answers prompts, and learns what a teacher predicts at each token of its answers.

Off-policy, a student learns the teacher's predictions after texts that it would not write itself. Here it learns them
where its own answers lead. The answers are taken as given: there is no gradient through the sampling.
Paper: https://arxiv.org/abs/2306.13649
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bagu.config import ConfigError
from bagu.nn.model import Transformer
from bagu.runs.display import Curve, Display, Headline
from bagu.train.cross_entropy import TargetTotals
from bagu.train.loss import Loss, Metrics, MicroBatchLoss
from bagu.train.objective import NO_MODELS
from bagu.train.objectives.distillation import DistillationLoss, TeacherObjective
from bagu.train.objectives.divergence import Divergence
from bagu.train.rl.loader import RolloutConfig
from bagu.train.rl.prompt_data import PromptObjective
from bagu.train.rl.rollout import Answer, PackShape, RolloutBatch
from bagu.train.rl.tally import ANSWER_CURVES


@dataclass(frozen=True, kw_only=True)
class OnPolicyDistillation(TeacherObjective[RolloutBatch], PromptObjective):
    """A step has `samples` answers of at most `max_tokens` tokens to each of `prompts` prompts, sampled at temperature
    1 with the weights before the step.
    """

    kind: Literal["on_policy_distill"] = "on_policy_distill"
    divergence: Divergence = "reverse"
    prompts: int = 32
    samples: int = 1
    max_tokens: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompts", "samples", "max_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"objective.{name} is {getattr(self, name)}", hint="at least 1")

    def rollout_config(self, seed: int) -> RolloutConfig:
        return RolloutConfig(
            prompts=self.prompts,
            samples=self.samples,
            max_tokens=self.max_tokens,
            epochs=1,
            minibatches=1,
            max_draws=1,
            fill=False,
            seed=seed,
        )

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> OnPolicyLoss:
        return OnPolicyLoss(self.teacher_loss(auxiliary["teacher"], None))

    def display(self) -> Display:
        return Display(
            curves=(
                self.divergence_curve,
                *ANSWER_CURVES,
                Curve(title="Sampling", unit="tokens/s", metrics={"rollout_tokens_per_s": "sampling"}, zero=True),
            ),
            headlines=(
                Headline(metric="val_divergence_nats", name="Divergence from the teacher", unit="nats"),
                Headline(metric="val_length_tokens", name="Length of answers", unit="tokens"),
            ),
            progress={
                "divergence_nats": "divergence {:.4f} nats",
                "length_tokens": "{:.0f} tokens",
                "val_divergence_nats": "validation {:.4f} nats",
            },
        )


@dataclass(frozen=True, kw_only=True)
class OnPolicyTotals(TargetTotals):
    """Adds the metrics of the rollout that a step trains on."""

    rollout: Mapping[str, float]


class OnPolicyLoss(Loss[RolloutBatch, OnPolicyTotals]):
    """The distillation loss of sampled answers. Implements `Learner` of loader.py: every answer is used."""

    validation_metric = "val_divergence_nats"

    def __init__(self, distillation: DistillationLoss) -> None:
        self.distillation = distillation

    def useful(self, rewards: Sequence[float]) -> bool:
        return True

    def prepare(self, model: Transformer, answers: Sequence[Answer], shape: PackShape) -> list[Answer]:
        return list(answers)

    def rollout_metrics(self, answers: Sequence[Answer]) -> dict[str, float]:
        return {}

    def weights(self, lengths: Sequence[int]) -> list[float]:
        return [1 / sum(lengths)] * len(lengths)

    def totals(self, batches: Sequence[RolloutBatch]) -> OnPolicyTotals:
        counts = TargetTotals.of(b.batch for b in batches if b.batch is not None)
        return OnPolicyTotals(**vars(counts), rollout=batches[0].rollout)

    def __call__(self, model: Transformer, batch: RolloutBatch, totals: OnPolicyTotals) -> MicroBatchLoss:
        assert batch.batch is not None, "every answer is used"
        return self.distillation(model, batch.batch, totals)

    def metrics(self, loss: float, sums: Mapping[str, float], totals: OnPolicyTotals) -> Metrics:
        return {**totals.rollout, **self.distillation.metrics(loss, sums, totals)}
