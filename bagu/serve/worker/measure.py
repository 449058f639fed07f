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
PROMPTS = (8, 64, 32, 256, 128, 512)  # tokens
BATCHES = ((1, 16), (4, 96), (8, 32), (2, 192))  # sequences of a decode step, and tokens before each
DECODES, REPEATS = 12, 5  # decodes and prompts of one shape; the fastest counts: other processes only make it slower


def measure_engine(engine: Engine) -> Capacity:
    """Time prompts of several lengths and decodes of several batch sizes."""
    limits = engine.scheduler.config
    timed = max(1, min(DECODES, engine.max_model_len // 2 - 2))  # fewer if sequences are very short
    longest = max(1, min(limits.max_num_batched_tokens, engine.max_model_len - timed - 2))
    steps = [Step.of_prompt(n) for n in PROMPTS if n <= longest] or [Step.of_prompt(n) for n in (1, 2, 3)]
    middle = 1 + timed // 2
    batches = [
        Step.of_decodes([min(context, longest) + middle] * n) for n, context in BATCHES if n <= limits.max_num_seqs
    ]
    mixed = [*steps[:2], batches[0], *(s for pair in zip(steps[2:], batches[1:], strict=False) for s in pair)]
    mixed += [s for s in (*steps, *batches) if s not in mixed]
    token = iter(range(1, 1 << 30))  # a first token of its own: the prefix cache must not have the prompt

    def run(step: Step) -> float:
        first = next(token) % engine.model.config.vocab_size
        if not step.decodes:
            prompts = [(first, i, *[1] * (step.prompt - 2))[: step.prompt] for i in range(REPEATS)]
            return min(sum(_step_times(engine, [prompt], 1)) for prompt in prompts)
        context = step.attended // step.decodes - middle
        prompts = [(first, i, *[1] * (context - 2))[:context] for i in range(step.decodes)]
        times = _step_times(engine, prompts, 2 + timed)
        return min(times[1:-1] or times)  # without the step of the prompts, and what is left after the last one

    cost = measure(run, mixed, budget_s=BUDGET_S)
    engine.blocks.reset_prefix_cache()
    groups = engine.blocks.groups if engine.config.prefix_cache else ()
    return Capacity(
        cost=cost, slots=limits.max_num_seqs, step_tokens=limits.max_num_batched_tokens,
        block_size=engine.blocks.block_size, groups=groups,
    )  # fmt: skip


def _step_times(engine: Engine, prompts: Sequence[tuple[int, ...]], new: int) -> list[float]:
    """The seconds of each step of these requests. The engine has no others."""
    sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(id=f"measure-{i}", prompt=prompt, sampling=sampling))
    found = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - began)
    return found


def measure_encoder(model: Transformer, encode: Callable[[Any, Any], Any], config: EngineConfig) -> Capacity:
    """Time texts of several lengths. An encoder computes one batch after the other."""
    longest = min(model.config.max_len, config.max_model_len or model.config.max_len)

    def seconds(text: tuple[int, ...]) -> float:
        began = time.perf_counter()
        encode(model, [text])
        return time.perf_counter() - began

    def run(step: Step) -> float:
        return min(seconds((0,) * step.prompt) for _ in range(REPEATS))

    steps = [Step.of_prompt(n) for n in PROMPTS if n <= longest] or [Step.of_prompt(n) for n in (1, 2, 3)]
    tokens = config.step_tokens(model.embedding.weight.device.type)
    return Capacity(cost=measure(run, steps, budget_s=BUDGET_S), slots=1, step_tokens=tokens)
