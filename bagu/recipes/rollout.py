"""Rollouts of a run: the inference engine over the trained model, the reward, and the loader that joins them.

The engine has the model's own tensors, not a copy. On a GPU it reads them at their addresses, also from CUDA graphs; on
a CPU outside invariant mode it packs a copy for its compiled decode step, again for each rollout.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from bagu.data.chat import ChatEncoder
from bagu.nn.change import evaluating
from bagu.nn.model import Transformer
from bagu.ops.call.eager import force_eager
from bagu.recipes.generation import read_generation
from bagu.recipes.inputs import Inputs
from bagu.recipes.rewards import load_reward
from bagu.recipes.run import Run
from bagu.serve.config import EngineConfig, GenerationDefaults
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.train.loss import Loss
from bagu.train.objective import TrainingData
from bagu.train.rl.loader import Learner, PromptLoader, RolloutLoader
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.rl.reward_function import RewardFunction
from bagu.train.served.reader import Reader
from bagu.types import Completion, Tokenizer

MAX_SEQUENCES = 512  # answers that are sampled at the same time
GPU_SHARE = 0.5  # of the memory, for the weights and the KV cache; the rest is the trainer's


def engine_config(*, answers: int, max_len: int, invariant: bool, eos_ids: tuple[int, ...] = ()) -> EngineConfig:
    """An engine for `answers` answers at a time, of at most `max_len` tokens with their prompt. `eos_ids` end an answer
    in addition to the end-of-text token of the tokenizer."""
    return EngineConfig(
        max_num_seqs=min(answers, MAX_SEQUENCES),
        max_model_len=max_len,
        gpu_memory_utilization=GPU_SHARE,
        invariant=invariant,
        generation=GenerationDefaults(eos_ids=eos_ids),
    )


def open_reward(objective: PolicyObjective, device: torch.device) -> RewardFunction:
    """The reward of the objective; a reward model runs on `device`. Close it."""
    return load_reward(
        objective.reward, default=objective.reward_default, timeout_s=objective.reward_timeout_s, device=device
    )


@contextmanager
def with_rollouts(
    run: Run, data: TrainingData[Any], inputs: Inputs, model: Transformer, loss: Loss[Any, Any]
) -> Iterator[TrainingData[Any]]:
    """The data of a run. If its objective reads prompts, the loader samples answers to them."""
    objective, source = run.objective, data.loader
    if not isinstance(source, PromptLoader):
        yield data
        return
    assert isinstance(loss, Learner)
    reward, invariant = None, False
    if isinstance(objective, PolicyObjective):
        reward, invariant = open_reward(objective, inputs.device), objective.invariant
    try:
        config = engine_config(
            answers=source.config.prompts * source.config.samples,
            max_len=run.data.context,
            invariant=invariant,
            eos_ids=() if inputs.start is None else read_generation(inputs.start).eos_ids,
        )
        config = replace(config, adjust_threads=not run.train.deterministic)
        stops = ChatEncoder(inputs.tokenizer).turn_ends
        loader = RolloutLoader(
            source,
            model=model,
            sampler=EngineSampler(model, inputs.tokenizer, config, stops=stops),
            reward=reward,
            learner=loss,
            decode=inputs.tokenizer.decode,
        )
        yield replace(data, loader=loader, held_out=loader.held_out)
    finally:
        if reward is not None:
            reward.close()


class EngineSampler:
    """`train.rollout.Sampler` with an engine over the model that is trained."""

    def __init__(
        self, model: Transformer, tokenizer: Tokenizer | None, config: EngineConfig, *, stops: Sequence[int] = ()
    ) -> None:
        self.model, self.stops = model, tuple(stops)
        with evaluating(model):
            self.engine = Engine(model, tokenizer, config)

    def sample(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, seeds: Sequence[int]
    ) -> list[Completion]:
        each = [
            Sampling(max_tokens=max_tokens, n=n, seed=seed, stop_token_ids=self.stops, logprobs=0) for seed in seeds
        ]
        # compiled blocks are compiled for the shapes of training, and here a shape changes at each step
        with evaluating(self.model), force_eager():
            return self.engine.generate(prompts, each)

    def weights_changed(self) -> None:
        with evaluating(self.model):
            self.engine.weights_changed()


class ServedSampler(EngineSampler):
    """An engine whose model is not the one that is trained: its weights come from parameter servers, and are of the
    bounded age that `reader` keeps."""

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None,
        config: EngineConfig,
        reader: Reader,
        *,
        stops: Sequence[int] = (),
    ) -> None:
        super().__init__(model, tokenizer, config, stops=stops)
        self.reader = reader

    def weights_changed(self) -> None:
        """Called before a rollout. What was computed with weights that are young enough stays."""
        if self.reader.refresh():
            super().weights_changed()
