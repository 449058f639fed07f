"""A policy over eight letters, with prompts and rollouts on the real engine: reinforcement learning in seconds."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from bagu.data.prompts import Prompt
from bagu.lab.parts.tiny import tiny
from bagu.nn import Transformer, init_weights
from bagu.recipes.rollout import EngineSampler, engine_config
from bagu.train.rl.loader import PromptLoader, RolloutConfig, RolloutLoader
from bagu.train.rl.policy_loss import PolicyLoss
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.reward_function import RewardFunction
from bagu.train.rl.rollout import PackShape

LETTERS = "abcdefgh"
CONTEXT = 24
MODEL = tiny(8, 32, layers=1, heads=2, kv_heads=1, ffn=48, max_len=CONTEXT)


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
        sources={"letters": prompts()},
        held_out_prompts=prompts(3),
        config=RolloutConfig(
            prompts=o.prompts,
            samples=o.samples,
            max_tokens=o.max_tokens,
            epochs=o.epochs,
            minibatches=o.minibatches,
            max_draws=o.max_draws,
            fill=o.fills,
            seed=seed,
        ),
        shape=PackShape(tokens=tokens, segments=o.prompts * o.samples, context=CONTEXT),
    )


def sampler(model: Transformer, objective: PolicyObjective, **settings: Any) -> EngineSampler:
    config = engine_config(
        answers=objective.prompts * objective.samples, max_len=CONTEXT, invariant=objective.invariant
    )
    return EngineSampler(model, Letters(), replace(config, **{"num_blocks": 64, "block_size": 4} | settings))


def rollouts(
    model: Transformer, objective: PolicyObjective, loss: PolicyLoss, reward: RewardFunction, **options: Any
) -> RolloutLoader:
    return RolloutLoader(
        source(objective, **options),
        model=model,
        sampler=sampler(model, objective),
        reward=reward,
        learner=loss,
        decode=Letters().decode,
    )
