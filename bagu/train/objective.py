"""An objective: everything that differs between pretraining, fine-tuning, masked language modelling and others.

One frozen dataclass holds its configuration (the `objective` of a run), identified by `kind`. Its methods check the
model and the run, read the data, create the loss, and define how its metrics are shown. The training loop does not
depend on objectives: it takes batches from a loader and passes them to a loss. `bagu/train/objectives` has one file per
objective.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, Literal, Protocol

from bagu.config import ConfigError, to_dict
from bagu.data import BpeTokenizer, Corpus, DataConfig, Selection, SourceConfig
from bagu.nn import ModelConfig, Transformer
from bagu.runs.display import Display, Table
from bagu.train.loop import Batches
from bagu.train.loss import BatchT, BatchT_co, Loss

NO_MODELS: Mapping[str, Transformer] = MappingProxyType({})
WholeModel = Literal["never", "prepare", "loss"]


class RunLoader(Batches[BatchT_co], Protocol[BatchT_co]):
    """The loader of a run: the interface of `fit`, and a JSON report of the data that a run of a given length uses.

    The report's `sources` has for each name at least `epochs`, the passes over that source. `tokens_per_step` is in it
    if it is not the number that the data configuration gives.
    """

    def report(self, steps: int) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class SourceSize:
    """The size of one source. `targets` are the tokens of the training part that count in the loss; `note` is what the
    plan of the run says about the source besides."""

    documents: int
    tokens: int
    targets: int
    validation_tokens: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainingData(Generic[BatchT]):
    """The training and held-out data of a run. `held_out(limit)` returns the same batches each time, at most `limit`
    of each source (None: all).
    """

    loader: RunLoader[BatchT]
    held_out: Callable[[int | None], Iterable[BatchT]]
    sources: Mapping[str, SourceSize]
    facts: Mapping[str, Mapping[str, Any]]  # by source, for data.json: hash, files, documents, tokens


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of a run that an objective may check."""

    init_from: str | None
    lora: bool
    sample_every: int | None


@dataclass(frozen=True, kw_only=True)
class Objective(ABC, Generic[BatchT]):
    """The configuration of an objective, and its behaviour.

    A subclass is a frozen dataclass with `kind: Literal["name"] = "name"`. Importing it registers it: `Run.objective`
    accepts every imported subclass, by `kind`.
    """

    kind: str

    @property
    def whole_model(self) -> WholeModel:
        """When a rank needs the whole trained model with its initial weights: "never", in "prepare", or for the "loss"
        too. Under ZeRO a rank then never has it, releases it before the states are made, or loads it as on one rank."""
        return "loss"

    def check_run(self, run: RunSettings) -> None:
        """Raise ConfigError for run settings that this objective does not support."""

    def check_model(self, model: ModelConfig) -> None:
        """Raise ConfigError for a model that this objective cannot train."""

    def model_config(self, start: ModelConfig) -> ModelConfig:
        """The model that the run trains, given the one that it starts from. Only `score_head` may differ: the head of
        `start` is then replaced by a new score head.
        """
        return start

    def auxiliary(self) -> Mapping[str, str]:
        """The models that the loss needs besides the trained one, as role: MODEL (see `Run.init_from`). The setting
        `objective.<role>` names each of them.

        They are loaded frozen, in the dtype and on the device of the run, and `loss` receives them. They must have
        the run's tokenizer. Checkpoints do not contain them; a resume raises if their weights have changed.
        """
        return {}

    def check_auxiliary(self, role: str, auxiliary: ModelConfig, model: ModelConfig) -> None:
        """Raise ConfigError for an auxiliary model that does not fit the trained model."""

    def check_tokenizer(self, tokenizer: BpeTokenizer) -> None:
        """Raise BaguError for a tokenizer that lacks something this objective needs, such as a mask token."""

    @abstractmethod
    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> Corpus:
        """The corpus of a source for this objective: text, chats, pairs. Nothing is read yet."""

    def data_shape(self, data: DataConfig) -> dict[str, Any]:
        """The settings that decide, besides the sources, which rows a step has. With another value a resumed run would
        skip rows or repeat them."""
        return {
            "data.context": data.context,
            "data.rows × data.micro_batches": data.rows_per_step,
            "data.packing": data.packing,
            "data.max_segments_per_row": data.max_segments_per_row,
            "data.mix": to_dict(data.mix),
        }

    def fit_context(
        self, corpora: Mapping[str, Any], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> DataConfig:
        """`data` with the context that suits model and corpora, for a run whose context nobody has chosen."""
        return data

    @abstractmethod
    def read(
        self, corpora: Mapping[str, Any], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[BatchT]:
        """Tokenise the corpora (from `corpus`), or load their tokens from the cache, and create the batches."""

    def prepare(
        self, data: TrainingData[BatchT], model: Transformer, *, steps: int, eval_batches: int
    ) -> TrainingData[BatchT]:
        """The data with what must be computed from the initial weights, such as the logprobs of a reference, for a run
        of `steps` steps that evaluates on `held_out(eval_batches)`. Called before the first step and on resume; `model`
        has the initial weights in both cases.
        """
        return data

    @abstractmethod
    def loss(self, model: Transformer, auxiliary: Mapping[str, Transformer] = NO_MODELS) -> Loss[BatchT, Any]:
        """The loss of one run. `model` has the initial weights of the run, also when it is resumed: a loss that
        compares with them takes its frozen copy here. `auxiliary` has the models that `auxiliary()` names, by role.
        """

    def finish(self, model: Transformer) -> None:
        """Remove what the loss has attached to the model. Called after the last step, before the model is saved."""

    @abstractmethod
    def display(self) -> Display:
        """How the metrics of this objective are shown."""

    def metric_tables(self, metrics: Sequence[Mapping[str, Any]]) -> Sequence[Table]:
        """Tables for the report that are made from the logged metrics of a run."""
        return ()

    def tables(self, data: TrainingData[BatchT], eval_batches: int) -> Sequence[Table]:
        """Additional tables for the report of a run."""
        return ()


def check_pretrained(kind: str, run: RunSettings) -> None:
    """Raise for a run that starts from new weights."""
    if run.init_from is None:
        raise ConfigError(
            f"objective {kind!r} fine-tunes a pretrained model, and init_from is not set",
            hint="give a model with --from, or set init_from",
        )


def check_causal(kind: str, model: ModelConfig) -> None:
    """Raise for a model that attends to the tokens it must predict, or that predicts none."""
    if model.score_head:
        raise ConfigError(
            f"objective {kind!r} predicts tokens, and this model has a score head instead of logits",
            hint="start from the language model that it was made from; --recipe reward trains a score head",
        )
    if not model.causal:
        raise ConfigError(
            f"objective {kind!r} predicts the next token, and a model with causal=false sees both sides of it",
            hint="use a causal model, or train this one with --recipe mlm (objective.kind=mlm)",
        )
