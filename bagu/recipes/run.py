"""What a training run is: one frozen tree, from the files it reads to the steps it makes.

Stages differ in data and start, not in kind. Pretraining begins with random weights; continued pretraining is the same
with `init_from` and, to limit forgetting, a mixture that holds some of the old data; with `mask_rate` it is masked
language modelling (BERT's), of a model that sees both sides. SFT reads chats and counts the assistant's tokens alone,
and with `lora` trains adapters instead of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from bagu.config import ConfigError
from bagu.data.loader import DataConfig
from bagu.data.masked import check_rate
from bagu.nn.config import ModelConfig
from bagu.nn.lora import check_targets
from bagu.train.state import TrainConfig

__all__ = ["STDLIB", "LoraConfig", "Run", "SourceConfig", "TokenizerConfig"]

STDLIB = "stdlib"  # the corpus that is always there


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Text (or, for SFT, chats): "stdlib", or a file or folder of text, JSON lines, .json lists or Parquet.

    `field` is the key or column that holds the text, `glob` which files of a folder are meant. For SFT the standard
    library gives docstring-to-function pairs of at most `max_bytes` an answer; any other source is JSON of chats, as
    messages, ShareGPT or Alpaca have them.
    """

    path: str = STDLIB
    field: str | None = None
    glob: str | None = None
    max_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """A tokenizer that is there (`path`), or one of `vocab_size` trained on at most `max_mb` of the training text."""

    path: str | None = None
    vocab_size: int | None = None
    max_mb: float = 64.0

    def __post_init__(self) -> None:
        if self.path is not None and self.vocab_size is not None:
            raise ConfigError("vocab_size is set, and a tokenizer that is read has its own", hint="leave one out")
        if not 0 < self.max_mb < float("inf"):
            raise ConfigError(f"a tokenizer learns from max_mb={self.max_mb}", hint="more than 0; 64 is usual")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on the linears whose name matches the regular expression `targets`."""

    rank: int = 8
    alpha: float = 16.0
    targets: str = ".*"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank is {self.rank}", hint="1 or more; 8 to 64 is usual")
        check_targets(self.targets)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A stage of training. Without `init_from`, `model` says what is made; with it, the model is what is found there.

    `init_from` is a run folder, a bagu checkpoint or a Hugging Face folder; its tokenizer is taken too unless one is
    named. `validation` is the share of documents held out, `dedup` the similarity from which a document counts as a
    copy of an earlier one (null: no look). `eval_batches` bounds an evaluation. `mask_rate` is the share of tokens that
    are hidden and asked for (BERT's: 0.15); null predicts the next token instead. `wandb` is the project at Weights &
    Biases that metrics are sent to; null sends nothing.
    """

    stage: Literal["pretrain", "sft"] = "pretrain"
    sources: dict[str, SourceConfig] = field(default_factory=lambda: {STDLIB: SourceConfig()})
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig
    train: TrainConfig
    model: ModelConfig | None = None
    init_from: str | None = None
    lora: LoraConfig | None = None
    mask_rate: float | None = None
    dtype: Literal["bf16", "fp32"] | None = None  # what the model computes in; null: by the hardware
    device: str | None = None
    validation: float = 0.05
    dedup: float | None = 0.8
    eval_batches: int = 16
    wandb: str | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.init_from is None):
            which = "both" if self.model is not None else "neither"
            raise ConfigError(
                f"a run has either model or init_from, and this has {which}",
                hint="a model that is found is not described, one that is described is new",
            )
        if self.wandb == "":
            raise ConfigError("wandb is an empty name", hint="name a project, or null for none")
        if self.eval_batches < 1:
            raise ConfigError(f"eval_batches is {self.eval_batches}", hint="at least 1")
        if not 0 < self.validation < 1:
            raise ConfigError(f"validation is {self.validation}", hint="a share between 0 and 1, 0.05 say")
        if self.dedup is not None and not 0 < self.dedup <= 1:
            raise ConfigError(f"dedup is {self.dedup}", hint="a similarity up to 1, 0.8 say, or null for no look")
        if not self.sources:
            raise ConfigError("there is no source", hint=f"sources.text.path={STDLIB} is always there")
        if self.stage == "sft" and self.init_from is None:
            raise ConfigError("SFT of random weights", hint="set init_from to a pretrained model")
        if self.lora is not None and self.init_from is None:
            raise ConfigError("LoRA on random weights", hint="set init_from to a pretrained model")
        if self.model is not None and self.data.context > self.model.max_len:
            raise ConfigError(
                f"data.context is {self.data.context}, and the model has positions for {self.model.max_len}",
                hint="raise model.max_len or lower data.context",
            )
        if self.mask_rate is not None:
            self._check_masked(self.mask_rate)
        if self.model is not None:
            self.check_sight(self.model)
        unknown = self.data.mix.weights.keys() - self.sources.keys() if self.data.mix.weights else set()
        if unknown:
            raise ConfigError(f"data.mix has a weight for {sorted(unknown)[0]!r}, and there is no such source")

    def _check_masked(self, rate: float) -> None:
        check_rate(rate)
        if self.stage == "sft":
            raise ConfigError("mask_rate is set, and SFT predicts the next token", hint="leave one of the two out")
        if self.train.sample_every is not None:
            raise ConfigError(
                f"train.sample_every is {self.train.sample_every}, and a masked language model does not continue texts",
                hint="set train.sample_every=null",
            )

    def check_sight(self, model: ModelConfig) -> None:
        """Refuse a model that sees the tokens this run asks it for, or only one side of them."""
        if self.mask_rate is None and not model.causal:
            raise ConfigError(
                "the model sees both sides of a token, and would be asked for the next one, which it sees",
                hint="--recipe mlm trains it (or mask_rate=0.15); SFT and text that goes on need a causal model",
            )
        if self.mask_rate is not None and model.causal:
            raise ConfigError(
                "mask_rate is set, and a causal model sees one side of a hidden token only",
                hint="set model.causal=false, or leave mask_rate out",
            )
