"""The configuration of a training run: one frozen tree, from the input files to the number of steps.

Runs differ in objective, data and start. The objective (`bagu/train/objectives`) determines the data format and the
loss. Pretraining starts from random weights; continued pretraining is the same with `init_from` and, to limit
forgetting, a mixture that contains some of the old data. With `lora`, adapters are trained instead of the weights.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from bagu import config as configs
from bagu.config import ConfigError
from bagu.data.corpus import STDLIB, Corpus, Selection, SourceConfig
from bagu.data.loader import DataConfig
from bagu.errors import UnknownName
from bagu.nn.config import ModelConfig
from bagu.nn.lora import Base, check_targets
from bagu.parallel.model_parallel import check_model_parallel
from bagu.parallel.pipeline import check_micro_batches
from bagu.train.objective import Objective, RunSettings
from bagu.train.objectives.language_modelling import LanguageModelling
from bagu.train.objectives.token_objective import TokenObjective
from bagu.train.rl.prompt_data import PromptObjective
from bagu.train.state import TrainConfig, check_token_loss


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """An existing tokenizer (`path`), or a new one of `vocab_size` trained on at most `max_mb` of the training text."""

    path: str | None = None
    vocab_size: int | None = None
    max_mb: float = 64.0

    def __post_init__(self) -> None:
        if self.path is not None and self.vocab_size is not None:
            raise ConfigError(
                "path and vocab_size are both set; a tokenizer at path has its own size", hint="leave one out"
            )
        if not 0 < self.max_mb < float("inf"):
            raise ConfigError(f"a tokenizer is trained on max_mb={self.max_mb}", hint="more than 0; 64 is usual")


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """LoRA: low-rank adapters on the linear layers whose name matches the regular expression `targets`.

    `base` is how the frozen weights of linear layers are stored: null is the dtype of the run, "int8" a quarter of
    fp32's memory, rounded with a scale per output row.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: str = ".*"
    base: Base | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"rank is {self.rank}", hint="1 or more; 8 to 64 is usual")
        check_targets(self.targets)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. `model` describes a new model; `init_from` is an existing one. Set exactly one of the two.

    `objective` is the training objective, by its `kind` (pretrain, sft, dpo, …), with its settings. `init_from` is a
    run folder, a bagu checkpoint or a Hugging Face folder; its tokenizer is used too unless one is given. `validation`
    is the fraction of documents held out, `dedup` the similarity above which a document of text is removed as a copy of
    an earlier one (auto: 0.8; null: none is removed; chats and other rows of files are not compared). `eval_batches`
    limits an evaluation. `eval_tasks` are tasks of `bagu eval` that every evaluation of the run scores too, the first
    `eval_items` items of each. `wandb` is the Weights & Biases project that receives the metrics; null sends nothing.
    """

    objective: Objective = field(default_factory=LanguageModelling)
    sources: dict[str, SourceConfig] = field(default_factory=lambda: {STDLIB: SourceConfig()})
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig
    train: TrainConfig
    model: ModelConfig | None = None
    init_from: str | None = None
    lora: LoraConfig | None = None
    dtype: Literal["bf16", "fp32"] | None = None  # compute dtype of the model; null: chosen for the hardware
    device: str | None = None
    validation: float = 0.05
    dedup: float | Literal["auto"] | None = "auto"
    eval_batches: int = 16
    eval_tasks: tuple[str, ...] = ()
    eval_items: int = 100
    wandb: str | None = None

    def __post_init__(self) -> None:
        if (self.model is None) == (self.init_from is None):
            which = "both" if self.model is not None else "neither"
            raise ConfigError(
                f"a run needs either model or init_from, and this has {which}",
                hint="set `model` or `init_from`, not both",
            )
        if self.wandb == "":
            raise ConfigError("wandb is an empty name", hint="name a project, or null for none")
        for name in ("eval_batches", "eval_items"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", hint="at least 1")
        if self.eval_tasks and self.train.eval_every is None:
            raise ConfigError("eval_tasks is set, and train.eval_every is null", hint="set train.eval_every")
        if self.eval_tasks and self.train.mesh.ranks > self.train.mesh.dp:
            raise ConfigError(
                f"eval_tasks and the mesh {self.train.mesh} do not go together: an engine needs the whole model",
                hint="use dp alone, or evaluate checkpoints with bagu eval",
            )
        if not 0 < self.validation < 1:
            raise ConfigError(f"validation is {self.validation}", hint="a share between 0 and 1, such as 0.05")
        if not (self.dedup is None or self.dedup == "auto" or 0 < self.dedup <= 1):
            raise ConfigError(f"dedup is {self.dedup}", hint="auto, a similarity up to 1, or null to keep all")
        if not self.sources:
            raise ConfigError("sources is empty", hint=f"sources.text.path={STDLIB} is always there")
        unknown = self.data.mix.weights.keys() - self.sources.keys() if self.data.mix.weights else set()
        if unknown:
            raise ConfigError(
                f"data.mix has a weight for {sorted(unknown)[0]!r}, which is not among the sources",
                hint=f"sources: {', '.join(self.sources)}",
            )
        if self.lora is not None and self.init_from is None:
            raise ConfigError(
                "lora trains adapters of a pretrained model, and init_from is not set", hint="set init_from"
            )
        sample_every = self.train.sample_every
        self.objective.check_run(
            RunSettings(init_from=self.init_from, lora=self.lora is not None, sample_every=sample_every)
        )
        self._check_mesh()
        if self.model is not None:
            self.check_model(self.model)

    def _check_mesh(self) -> None:
        """Raise for an objective or a shape of data that the mesh cannot train."""
        mesh, data = self.train.mesh, self.data
        ranks = mesh.size("data")
        if mesh.ranks > 1 and isinstance(self.objective, PromptObjective):
            raise ConfigError(
                f"objective {self.objective.kind!r} and the mesh {mesh} do not go together: "
                "its batches are generated by one engine that has the whole model",
                hint="train it on one rank",
            )
        is_token_loss = isinstance(self.objective, TokenObjective)
        check_token_loss(mesh, f"objective {self.objective.kind!r}", is_token_loss=is_token_loss)
        measured = self.train.shares == "measured" and data.micro_batches >= ranks
        if data.micro_batches % ranks and not measured:
            whole = data.rows_per_step % ranks == 0
            same = f"data.micro_batches={ranks} data.rows={data.rows_per_step // ranks} is the same number of tokens"
            raise ConfigError(
                f"a step has {data.micro_batches} micro-batches, and the mesh {mesh} divides them over {ranks} ranks",
                hint=f"give a multiple of {ranks}" + (f": {same}" if whole else ""),
            )
        if mesh.pp > 1:
            check_micro_batches(self.train.schedule_of_pipeline, data.micro_batches // ranks, mesh.pp)
        tokens, method = data.rows * data.context, self.train.context_method
        parts = mesh.tp * (mesh.cp if method == "ulysses" else 1)  # the ring pads its parts
        if (method == "ulysses" or mesh.cp == 1) and tokens % parts:
            raise ConfigError(
                f"a micro-batch has {tokens} tokens, and the mesh {mesh} divides them by {parts}",
                hint=f"make data.rows times data.context a multiple of {parts}",
            )

    def check_model(self, model: ModelConfig) -> None:
        """Raise for a model that the objective or the mesh cannot train, or whose context is too short for the data."""
        self.objective.check_model(model)
        train = self.train
        check_model_parallel(
            model,
            train.mesh,
            schedule=train.schedule_of_pipeline,
            stages_per_rank=train.stages_per_rank or 2,
            method=train.context_method,
        )
        if self.data.context > model.max_len:
            raise ConfigError(
                f"data.context is {self.data.context}, and the model has positions for {model.max_len}",
                hint=f"set data.context={model.max_len} or less"
                + ("" if self.model is None else ", or raise model.max_len"),
            )

    @property
    def selection(self) -> Selection:
        return Selection(dedup=self.dedup, validation=self.validation, seed=self.data.seed)

    def corpora(self) -> dict[str, Corpus]:
        """The sources as corpora of the objective. Nothing is read yet."""
        return {name: self.objective.corpus(name, source, self.selection) for name, source in self.sources.items()}


def load_run(path: str | os.PathLike[str]) -> Run:
    """The run in a config.json."""
    return configs.load(Run, path)


def with_settings(run: Run, settings: Sequence[str]) -> Run:
    """`run` changed by settings like "train.optimizer.lr=3e-4".

    A setting of a source that the run does not have adds one only if its path is given: with a mistyped name, the
    default path would train on the standard library too.
    """
    changed = configs.override(run, settings)
    keys = {setting.partition("=")[0].strip() for setting in settings}
    for name in changed.sources.keys() - run.sources.keys():
        if keys.isdisjoint({"sources", f"sources.{name}", f"sources.{name}.path"}):
            raise UnknownName.among("source", name, run.sources)
    return changed
