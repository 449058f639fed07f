"""Masked language modelling (BERT): mask some tokens of a text and predict them from the tokens on both sides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from bagu.config import ConfigError
from bagu.data import BpeTokenizer, DataConfig, Selection, SourceConfig, TextCorpus
from bagu.data.masked import HIDDEN, RANDOM, Masking, check_rate, mask_batch
from bagu.nn.config import ModelConfig
from bagu.runs.display import Curve, Display, Headline, Table
from bagu.train.objective import RunSettings, TrainingData
from bagu.train.objectives.language_modelling import text_stores
from bagu.train.objectives.token_objective import TokenObjective, token_data
from bagu.types import Batch


@dataclass(frozen=True, kw_only=True)
class MaskedLanguageModelling(TokenObjective):
    """The masked tokens of a text are the targets: `mask_rate` of the tokens that are not special (BERT's is 0.15)."""

    kind: Literal["mlm"] = "mlm"
    mask_rate: float = 0.15

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate(self.mask_rate)

    def check_run(self, run: RunSettings) -> None:
        if run.sample_every is not None:
            raise ConfigError(
                f"train.sample_every is {run.sample_every}, and a masked language model does not continue texts",
                hint="set train.sample_every=null",
            )

    def check_model(self, model: ModelConfig) -> None:
        if model.causal:
            raise ConfigError(
                f"objective {self.kind!r} predicts hidden tokens from both sides, and a causal model sees one side",
                hint="set model.causal=false, or objective.kind=pretrain",
            )

    def check_tokenizer(self, tokenizer: BpeTokenizer) -> None:
        Masking.of(tokenizer, rate=self.mask_rate, seed=0)  # raises for a tokenizer without a mask token

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> TextCorpus:
        return TextCorpus(name, config, selection)

    def read(
        self, corpora: Mapping[str, TextCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[Batch]:
        masking = Masking.of(tokenizer, rate=self.mask_rate, seed=data.seed)

        def hide(batch: Batch, *place: str | int) -> Batch:
            return mask_batch(batch, masking, *place)

        return token_data(corpora, text_stores(corpora, tokenizer), data, model.vocab_size, hide)

    def display(self) -> Display:
        """No bits per byte: the loss of masked tokens is not a code length of the text."""
        note = f"of the {100 * self.mask_rate:g} % of positions that are masked"
        losses = {"loss_nats": "training", "val_loss_nats": "validation"}
        return Display(
            curves=(Curve(title="Loss", unit="nats per masked position", metrics=losses),),
            headlines=(
                Headline(metric="val_loss_nats", name="Validation loss", unit="nats", note=note),
                Headline(metric="loss_nats", name="Training loss", unit="nats", note=note),
            ),
            progress={"loss_nats": "loss {:.3f} nats", "val_loss_nats": "validation {:.3f} nats"},
        )

    def tables(self, data: TrainingData[Batch], eval_batches: int) -> Sequence[Table]:
        with data.loader.prefetch(0) as steps:
            first = next(steps)
        targets, tokens = sum(b.num_targets for b in first), sum(b.num_tokens for b in first)
        held_out = sum(b.num_targets for b in data.held_out(eval_batches))
        rows = [
            ("hidden, of the tokens that are not special", f"{100 * self.mask_rate:g} %"),
            (
                "shown as the mask token, as a random one, as they are",
                f"{100 * HIDDEN:.0f} %, {100 * RANDOM:.0f} %, {100 * (1 - HIDDEN - RANDOM):.0f} %",
            ),
            ("masked positions of the first step", f"{targets:,} of {tokens:,} tokens"),
            ("masked positions of the validation", f"{held_out:,}"),
        ]
        note = (
            "Losses are means over masked positions, in nats. They are not a code length of the text, so there are no "
            "bits per byte. Every step hides other positions, the validation the same ones each time."
        )
        return (Table(title="Masked positions", columns=("what", "value"), rows=rows, note=note),)
