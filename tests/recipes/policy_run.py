"""A small policy over eight letters, its prompts and a reward: what the tests of GRPO and PPO train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from bagu.data.prompts import Prompt
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.rollout import EngineSampler, engine_config
from bagu.serve.config import EngineConfig
from bagu.train.policy_loss import PolicyLoss
from bagu.train.policy_objective import PolicyObjective
from bagu.train.reward_function import Sample, Scored
from bagu.train.rollout import PackShape
from bagu.train.rollout_loader import PromptLoader, RolloutConfig, RolloutLoader

LETTERS = "abcdefgh"
CONTEXT = 24
MODEL = ModelConfig(
    vocab_size=8, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=48,
    max_len=CONTEXT,
)  # fmt: skip


class Letters:
    """A tokenizer of one letter per token; the last one ends a text."""

    vocab_size, eos_id, byte_level = 8, 7, True

    def encode(self, text: str) -> list[int]:
        return [LETTERS.index(c) for c in text]

    encode_prompt = encode

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(LETTERS[i] for i in ids)

    def bytes_of(self, id: int) -> bytes:
        return LETTERS[id].encode()


class Share:
    """The share of the letter c in an answer."""

    name = "share of c"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: Sequence[Sample]) -> list[Scored]:
        self.calls += 1
        return [Scored(reward=s.completion.count("c") / max(len(s.completion), 1)) for s in samples]

    def close(self) -> None:
        pass


class Notes:
    """An observer that keeps the metrics of the steps."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, Any]] = {}

    def on_step(self, step: int, metrics: Mapping[str, float | int | None]) -> None:
        self.rows[step] = dict(metrics)

    def on_event(self, kind: str, step: int, **facts: Any) -> None:
        pass

    def on_sample(self, step: int, texts: Sequence[str]) -> None:
        pass

    def rewind(self, step: int) -> None:
        pass

    def close(self) -> None:
        pass


def policy(seed: int = 1, **changes: Any) -> Transformer:
    return init_weights(Transformer(replace(MODEL, **changes), dtype=torch.float32), seed)


def prompts(count: int = 6) -> list[Prompt]:
    """Prompts of different lengths; some share their beginning."""
    texts = [("abca" * 3)[: 2 + i] for i in range(count)]
    return [
        Prompt(id=str(i), ids=tuple(Letters().encode(text)), text=text, facts={"number": i})
        for i, text in enumerate(texts)
    ]


def source(objective: PolicyObjective, *, seed: int = 0, tokens: int = 4 * CONTEXT) -> PromptLoader:
    o = objective
    return PromptLoader(
        sources={"letters": prompts()}, held_out_prompts=prompts(3),
        config=RolloutConfig(
            prompts=o.prompts, samples=o.samples, max_tokens=o.max_tokens, epochs=o.epochs, minibatches=o.minibatches,
            max_draws=o.max_draws, fill=o.fills, seed=seed,
        ),
        shape=PackShape(tokens=tokens, segments=o.prompts * o.samples, context=CONTEXT),
    )  # fmt: skip


def sampler(model: Transformer, objective: PolicyObjective, **settings: Any) -> EngineSampler:
    config = engine_config(
        answers=objective.prompts * objective.samples, max_len=CONTEXT, invariant=objective.invariant
    )
    chosen: EngineConfig = replace(config, **{"num_blocks": 64, "block_size": 4} | settings)
    return EngineSampler(model, Letters(), chosen)


def rollouts(
    model: Transformer, objective: PolicyObjective, loss: PolicyLoss, *, reward: Any = None, **options: Any
) -> RolloutLoader:
    return RolloutLoader(
        source(objective, **options), model=model, sampler=sampler(model, objective), reward=reward or Share(),
        learner=loss, decode=Letters().decode,
    )  # fmt: skip
