"""How fast this engine is, measured before it serves: for the router that chooses between several (serve/replicas)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bagu.parallel.unlike.profile import Step, measure
from bagu.serve.config import EngineConfig
from bagu.serve.request import Request, Sampling
from bagu.serve.wire.messages import Capacity

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.nn.model import Transformer
    from bagu.serve.engine import Engine

BUDGET_S = 2.0  # of timed steps: small ones first, and three at least
PROMPTS, BATCHES = (8, 64, 32, 256, 128, 512), (1, 4, 2, 8)  # tokens of a prompt, and sequences of a decode step
CONTEXT, DECODES = 16, 4  # tokens before a timed decode, and how many of them are timed


def measure_engine(engine: Engine) -> Capacity:
    """Time prompts of several lengths and decodes of several batch sizes."""
    limits = engine.scheduler.config
    longest = min(limits.max_num_batched_tokens, engine.max_model_len - DECODES - 2)
    steps = [Step.of_prompt(n) for n in PROMPTS if n <= longest] or [Step.of_prompt(n) for n in (1, 2, 3)]
    context = min(CONTEXT, longest)
    batches = [Step.of_decodes([context + 1 + DECODES // 2] * n) for n in BATCHES if n <= limits.max_num_seqs]
    mixed = [*steps[:2], batches[0], *(s for pair in zip(steps[2:], batches[1:], strict=False) for s in pair)]
    mixed += [s for s in (*steps, *batches) if s not in mixed]
    token = iter(range(1, 1 << 30))  # a first token of its own: the prefix cache must not have the prompt

    def run(step: Step) -> float:
        first = next(token) % engine.model.config.vocab_size
        if not step.decodes:
            return min(_seconds(engine, [(first, i, *[1] * (step.prompt - 2))[: step.prompt]], 1) for i in range(2))
        prompts = [(first, i, *[1] * (context - 2))[:context] for i in range(step.decodes)]
        _seconds(engine, prompts, 1)  # after this the prompts are cached, and both runs below compute the same
        alone = min(_seconds(engine, prompts, 1) for _ in range(2))
        return max(1e-6, _seconds(engine, prompts, 1 + DECODES) - alone) / DECODES

    cost = measure(run, mixed, budget_s=BUDGET_S)
    engine.blocks.reset_prefix_cache()
    groups = engine.blocks.groups if engine.config.prefix_cache else ()
    return Capacity(
        cost=cost, slots=limits.max_num_seqs, step_tokens=limits.max_num_batched_tokens,
        block_size=engine.blocks.block_size, groups=groups,
    )  # fmt: skip


def _seconds(engine: Engine, prompts: Sequence[tuple[int, ...]], new: int) -> float:
    sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    engine.rehearse(Request(id=f"measure-{i}", prompt=p, sampling=sampling) for i, p in enumerate(prompts))
    return time.perf_counter() - began


def measure_encoder(model: Transformer, encode: Callable[[Any, Any], Any], config: EngineConfig) -> Capacity:
    """Time texts of several lengths. An encoder computes one batch after the other."""
    longest = min(model.config.max_len, config.max_model_len or model.config.max_len)

    def run(step: Step) -> float:
        began = time.perf_counter()
        encode(model, [(0,) * step.prompt])
        return time.perf_counter() - began

    steps = [Step.of_prompt(n) for n in PROMPTS if n <= longest] or [Step.of_prompt(n) for n in (1, 2, 3)]
    tokens = config.step_tokens(model.embedding.weight.device.type)
    return Capacity(cost=measure(run, steps, budget_s=BUDGET_S), slots=1, step_tokens=tokens)
