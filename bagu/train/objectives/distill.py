"""Distillation: train a student to predict what a teacher predicts, token by token, on texts or chats.

The teacher's distribution of every target position replaces the one token that the text has there. Student and teacher
must have the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from bagu import ops
from bagu.config import ConfigError
from bagu.data.corpus import Corpus, Selection, SourceConfig
from bagu.data.loader import DataConfig
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig
from bagu.nn.model import Transformer
from bagu.runs.display import Curve, Display, Headline
from bagu.train.cross_entropy import TargetTotals
from bagu.train.divergence import Divergence, Head, divergence_loss
from bagu.train.loss import Loss, Metrics, MicroBatchLoss
from bagu.train.objective import Objective, TrainingData, check_causal
from bagu.train.objectives.language_modelling import LanguageModelling
from bagu.train.objectives.sft import SupervisedFineTuning
from bagu.train.token_objective import TokenObjective
from bagu.types import IGNORE, Batch

__all__ = ["Distillation", "DistillationLoss"]

READERS: dict[str, TokenObjective] = {"text": LanguageModelling(), "chats": SupervisedFineTuning()}


@dataclass(frozen=True, kw_only=True)
class Distillation(Objective[Batch]):
    """Minimises the divergence of the student from `teacher` (a MODEL) at the target tokens of `data`: all tokens of a
    text, the assistant's tokens of a chat. train/divergence.py defines the divergences; `beta` is that of "jsd" (null:
    0.5).

    Both distributions are taken at `temperature`, and the divergence is multiplied by its square, which keeps the size
    of the gradients (https://arxiv.org/abs/1503.02531). `cross_entropy` is the weight of the cross-entropy of the
    tokens themselves, which is added.
    """

    kind: Literal["distill"] = "distill"
    teacher: str = ""
    data: Literal["text", "chats"] = "text"
    divergence: Divergence = "forward"
    beta: float | None = None
    temperature: float = 1.0
    cross_entropy: float = 0.0

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
        if not 0 <= self.cross_entropy < float("inf"):
            raise ConfigError(f"cross_entropy is {self.cross_entropy}", hint="a weight of 0 or more")

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

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> Corpus:
        return READERS[self.data].corpus(name, config, selection)

    def read(
        self, corpora: Mapping[str, Any], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[Batch]:
        return READERS[self.data].read(corpora, tokenizer, data, model)

    def loss_with(self, model: Transformer, auxiliary: Mapping[str, Transformer]) -> DistillationLoss:
        return DistillationLoss(
            auxiliary["teacher"], self.divergence, beta=0.5 if self.beta is None else self.beta,
            temperature=self.temperature, cross_entropy=self.cross_entropy,
        )  # fmt: skip

    def display(self) -> Display:
        name = {"forward": "KL(teacher‖student)", "reverse": "KL(student‖teacher)", "jsd": "Jensen–Shannon divergence"}
        return Display(
            curves=(
                Curve(
                    title=name[self.divergence], unit="nats per token", zero=True,
                    metrics={"divergence_nats": "training", "val_divergence_nats": "validation"},
                ),
                Curve(
                    title="Loss", unit="nats per token",
                    metrics={"loss_nats": "training", "val_loss_nats": "validation"},
                ),
                Curve(
                    title="Bits per byte", unit="bits per byte", references=True,
                    metrics={"bits_per_byte": "training", "val_bits_per_byte": "validation"},
                ),
            ),
            headlines=(
                Headline(metric="val_divergence_nats", name="Divergence from the teacher", unit="nats"),
                Headline(metric="val_bits_per_byte", name="Validation", unit="bits/byte"),
                Headline(metric="val_loss_nats", name="Validation loss", unit="nats"),
            ),
            progress={
                "divergence_nats": "divergence {:.4f} nats",
                "loss_nats": "loss {:.3f} nats",
                "val_divergence_nats": "validation {:.4f} nats",
            },
        )  # fmt: skip


class DistillationLoss(Loss[Batch, TargetTotals]):
    """The divergence of the targets, times temperature², plus `cross_entropy` times their cross-entropy, plus the
    student's MoE balance loss.

    Metrics: `divergence_nats` per target. `loss_nats` and `bits_per_byte` are the cross-entropy, of training steps only
    if it has a weight. `objective_nats` is the minimised loss, if it differs from the divergence.
    """

    validation_metric = "val_divergence_nats"

    def __init__(
        self, teacher: Transformer, kind: Divergence, *, beta: float, temperature: float, cross_entropy: float
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
        if self.cross_entropy or not torch.is_grad_enabled():
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
