"""The data of objectives that train on answers of the model: prompts, which a RolloutLoader gives to an engine."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagu.config import ConfigError
from bagu.data import BpeTokenizer, ChatEncoder, DataConfig, MixConfig
from bagu.data.corpus import PARTS, Selection, SourceConfig
from bagu.data.mix import Mixture
from bagu.data.prompts import Prompt, PromptCorpus, fitting
from bagu.data.split import place
from bagu.nn.config import ModelConfig
from bagu.train.objective import Objective, SourceSize, TrainingData
from bagu.train.rl.loader import PromptLoader, RolloutConfig
from bagu.train.rl.rollout import PackShape, RolloutBatch


@dataclass(frozen=True, kw_only=True)
class PromptObjective(Objective[RolloutBatch]):
    """An objective whose corpora are prompts. The answers are sampled by a RolloutLoader, which needs the model
    (recipes/rollout.py)."""

    @abstractmethod
    def rollout_config(self, seed: int) -> RolloutConfig:
        """What a rollout has: prompts, answers, steps."""

    def check_tokenizer(self, tokenizer: BpeTokenizer) -> None:
        ChatEncoder(tokenizer)  # raises for a tokenizer without a chat template

    def corpus(self, name: str, config: SourceConfig, selection: Selection) -> PromptCorpus:
        return PromptCorpus.of(name, config, selection)

    def data_shape(self, data: DataConfig) -> dict[str, Any]:
        return {"data.context": data.context}  # decides which prompts fit; rows are only the size of a micro-batch

    def read(
        self, corpora: Mapping[str, PromptCorpus], tokenizer: BpeTokenizer, data: DataConfig, model: ModelConfig
    ) -> TrainingData[RolloutBatch]:
        return prompt_data(corpora, tokenizer, data, self.rollout_config(data.seed))


def prompt_data(
    corpora: Mapping[str, PromptCorpus], tokenizer: BpeTokenizer, data: DataConfig, config: RolloutConfig
) -> TrainingData[RolloutBatch]:
    """The prompts of `corpora` that leave room for an answer. Its loader has no answers yet: see recipes/rollout.py."""
    _check(data, config)
    encoder, room = ChatEncoder(tokenizer), data.context - config.max_tokens
    train, held = (
        {name: fitting(corpus.prompts(part, encoder), room=room) for name, corpus in corpora.items()} for part in PARTS
    )
    loader = PromptLoader(
        sources={name: prompts for name, (prompts, _) in train.items()},
        held_out_prompts=_in_fair_order({name: prompts for name, (prompts, _) in held.items()}, data.seed),
        config=config,
        mixture=_mixture(data.mix, {name: len(prompts) for name, (prompts, _) in train.items()}),
        shape=PackShape(
            tokens=data.rows * data.context, segments=config.prompts * config.samples, context=data.context
        ),
    )
    facts = {
        name: {
            **corpus.facts,
            "train_prompts": len(train[name][0]),
            "validation_prompts": len(held[name][0]),
            "prompts_too_long": train[name][1] + held[name][1],
        }
        for name, corpus in corpora.items()
    }
    sizes = {name: _size(train[name][0], held[name][0]) for name in corpora}
    return TrainingData(loader=loader, held_out=loader.held_out, sources=sizes, facts=facts)


def _mixture(config: MixConfig, prompts: Mapping[str, int]) -> Mixture | None:
    """A draw is a row of the mixture. Without weights or temperature all prompts are one list."""
    return None if config == MixConfig() or len(prompts) == 1 else Mixture(config, prompts, rows_per_step=1)


def _in_fair_order(sources: Mapping[str, Sequence[Prompt]], seed: int) -> list[Prompt]:
    """The prompts of all sources by a hash, so that the first ones, which an evaluation uses, are a fair sample."""
    listed = [(name, prompt) for name, prompts in sources.items() for prompt in prompts]
    listed.sort(key=lambda pair: place(f"{pair[0]}:{pair[1].id}", seed=seed, purpose="order"))
    return [prompt for _, prompt in listed]


def _check(data: DataConfig, config: RolloutConfig) -> None:
    if data.context <= config.max_tokens:
        raise ConfigError(
            f"data.context is {data.context} and objective.max_tokens {config.max_tokens}: no room for a prompt",
            hint="raise data.context, or lower objective.max_tokens",
        )
    for name, given in (
        ("micro_batches", data.micro_batches > 1),
        ("mix.schedule", bool(data.mix.schedule)),
        ("packing", data.packing != "stream"),
        ("max_segments_per_row", data.max_segments_per_row is not None),
    ):
        if given:
            raise ConfigError(
                f"data.{name} is set, and has no effect on rollouts",
                hint="leave it out: micro-batches have whole answers, up to rows * context tokens, to all prompts",
            )


def _size(train: Sequence[Prompt], held: Sequence[Prompt]) -> SourceSize:
    tokens, held_tokens = (sum(len(p.ids) for p in prompts) for prompts in (train, held))
    return SourceSize(documents=len(train), tokens=tokens, targets=0, validation_tokens=held_tokens)
