"""Distillation: train a student to predict what a teacher predicts, token by token, on texts or chats."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from bagu.config import ConfigError
from bagu.data import BpeTokenizer, Corpus, DataConfig, Selection, SourceConfig
from bagu.nn import ModelConfig, Transformer
from bagu.runs.display import Display, Headline
from bagu.train.objective import NO_MODELS, TrainingData, WholeModel
from bagu.train.objectives.distillation import DistillationLoss, TeacherObjective
from bagu.train.objectives.language_modelling import NEXT_TOKEN_DISPLAY, LanguageModelling
from bagu.train.objectives.sft import SupervisedFineTuning
from bagu.train.objectives.token_objective import TokenObjective
from bagu.types import Batch

READERS: dict[str, TokenObjective] = {"text": LanguageModelling(), "chats": SupervisedFineTuning()}


@dataclass(frozen=True, kw_only=True)
class Distillation(TeacherObjective[Batch]):
    """Distillation at the target tokens of `data`: all tokens of a text, the assistant's tokens of a chat.

    `cross_entropy` is the weight of the cross-entropy of the tokens themselves, which is added.
    """

    kind: Literal["distill"] = "distill"
    data: Literal["text", "chats"] = "text"
    cross_entropy: float = 0.0

    @property
    def whole_model(self) -> WholeModel:
        return "never"  # the teacher is a model of its own, which every rank loads

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.cross_entropy < float("inf"):
            raise ConfigError(f"cross_entropy is {self.cross_entropy}", hint="a weight of 0 or more")

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> Corpus:
        return READERS[self.data].corpus(name, config, selection)

    def read(
        self, corpora: Mapping[str, Any], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[Batch]:
        return READERS[self.data].read(corpora, tokenizer, data, model)

    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> DistillationLoss:
        return self.teacher_loss(auxiliary["teacher"], self.cross_entropy)

    def display(self) -> Display:
        return Display(
            curves=(self.divergence_curve, *NEXT_TOKEN_DISPLAY.curves),
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
        )
