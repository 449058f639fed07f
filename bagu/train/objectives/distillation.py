"""What objectives with a teacher share: its settings and checks, and the loss of a batch.

The teacher's distribution of every target position replaces the one token that stands there. Student and teacher must
have the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from bagu import ops
from bagu.config import ConfigError
from bagu.nn import ModelConfig, Transformer
from bagu.runs.display import Curve
from bagu.train.cross_entropy import TargetTotals
from bagu.train.loss import BatchT, Loss, Metrics, MicroBatchLoss
from bagu.train.objective import Objective, check_causal
from bagu.train.objectives.divergence import Divergence, Head, divergence_loss
from bagu.types import IGNORE, Batch

DIVERGENCES = {"forward": "KL(teacher‖student)", "reverse": "KL(student‖teacher)", "jsd": "Jensen–Shannon divergence"}


@dataclass(frozen=True, kw_only=True)
class TeacherObjective(Objective[BatchT]):
    """Minimises the divergence of the student from `teacher`, a MODEL. divergence.py defines the divergences;
    `beta` is that of "jsd" (null: 0.5).

    Both distributions are taken at `temperature`, and the divergence is multiplied by its square, which keeps the size
    of the gradients (https://arxiv.org/abs/1503.02531).
    """

    teacher: str = ""
    divergence: Divergence = "forward"
    beta: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.beta is not None and self.divergence != "jsd":
            raise ConfigError(
                f"beta is {self.beta}, and divergence {self.divergence!r} has none",
                hint="remove it, or set objective.divergence=jsd",
            )
        if self.beta is not None and not 0 < self.beta < 1:
            raise ConfigError(f"beta is {self.beta}", hint="give a number between 0 (forward KL) and 1 (reverse KL)")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}", hint="a positive number; 1 to 4 is usual")

    def auxiliary(self) -> Mapping[str, str]:
        return {"teacher": self.teacher}

    def check_auxiliary(self, role: str, auxiliary: ModelConfig, model: ModelConfig) -> None:
        check_causal(self.kind, auxiliary)
        if auxiliary.vocab_size != model.vocab_size:
            raise ConfigError(
                f"the teacher has a vocabulary of {auxiliary.vocab_size} and the student of {model.vocab_size}",
                hint="their distributions are compared token by token: choose models with the same vocab_size",
            )

    def check_model(self, model: ModelConfig) -> None:
        check_causal(self.kind, model)

    @property
    def divergence_curve(self) -> Curve:
        return Curve(
            title=DIVERGENCES[self.divergence],
            unit="nats per token",
            zero=True,
            metrics={"divergence_nats": "training", "val_divergence_nats": "validation"},
        )

    def teacher_loss(self, teacher: Transformer, cross_entropy: float | None) -> DistillationLoss:
        """The loss of this objective on a plain batch."""
        return DistillationLoss(
            teacher,
            self.divergence,
            beta=0.5 if self.beta is None else self.beta,
            temperature=self.temperature,
            cross_entropy=cross_entropy,
        )


class DistillationLoss(Loss[Batch, TargetTotals]):
    """The divergence of the targets, times temperature², plus `cross_entropy` times their cross-entropy, plus the
    student's MoE balance loss.

    Metrics: `divergence_nats` per target. `loss_nats` and `bits_per_byte` are the cross-entropy, of training steps only
    if it has a weight; None computes it never. `objective_nats` is the minimised loss, if it differs from the
    divergence.
    """

    validation_metric = "val_divergence_nats"

    def __init__(
        self, teacher: Transformer, kind: Divergence, *, beta: float, temperature: float, cross_entropy: float | None
    ) -> None:
        self.teacher = teacher.eval().requires_grad_(False)
        self.kind, self.beta, self.temperature, self.cross_entropy = kind, beta, temperature, cross_entropy

    def totals(self, batches: Sequence[Batch]) -> TargetTotals:
        return TargetTotals.of(batches)

    def __call__(self, model: Transformer, batch: Batch, totals: TargetTotals) -> MicroBatchLoss:
        inputs = batch.ids, batch.positions, batch.cu_seqlens, batch.max_len
        with torch.no_grad():
            teacher = Head(self.teacher(*inputs).hidden, self.teacher.head_weight)
        out = model(*inputs)
        student = Head(out.hidden, model.head_weight)
        weights = (batch.targets != IGNORE).float() / totals.targets
        divergence, _ = divergence_loss(
            student, teacher, weights, self.kind, beta=self.beta, temperature=self.temperature
        )
        loss, metrics = divergence * self.temperature**2, {"divergence": divergence.detach()}
        if self.cross_entropy or (self.cross_entropy is not None and not torch.is_grad_enabled()):
            nll, _, _ = ops.linear_cross_entropy_loss(*student, batch.targets, weights, ignore_index=IGNORE)
            loss, metrics["nll"] = loss + self.cross_entropy * nll, nll.detach()
        if out.aux_loss is not None:
            loss = loss + out.aux_loss * (batch.num_tokens / totals.tokens)
        return MicroBatchLoss(loss=loss, metrics=metrics, expert_load=out.expert_load)

    def metrics(self, loss: float, sums: Mapping[str, float], totals: TargetTotals) -> Metrics:
        values: Metrics = {"divergence_nats": sums["divergence"]}
        if "nll" in sums:
            values |= {"loss_nats": sums["nll"], "bits_per_byte": totals.bits_per_byte(sums["nll"])}
        if loss != sums["divergence"]:
            values["objective_nats"] = loss
        return values
