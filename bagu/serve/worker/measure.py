"""How fast this engine is, measured before it serves: for the router that chooses between several (serve/replicas)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bagu.parallel.unlike.profile import Step, Took, measure
from bagu.serve.config import EngineConfig
from bagu.serve.request import Request, Sampling
from bagu.serve.wire.messages import Capacity

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.nn.model import Transformer
    from bagu.serve.engine import Engine

BUDGET_S = 2.0  # small steps first, and three at least
PROMPTS = (8, 128, 32, 512)  # tokens
# sequences of a decode step, and tokens before each; on a CPU the budget ends before the last ones
BATCHES = ((1, 16), (4, 96), (1, 384), (8, 32), (16, 48), (64, 32), (256, 16))
DECODES = 8  # of one shape in a round


def _prompt_steps(longest: int) -> list[Step]:
    """Three or more, of prompts up to this long."""
    lengths = [n for n in PROMPTS if n <= longest]
    return [Step.of_prompt(n) for n in (lengths if len(lengths) > 2 else (1, 2, 3))]


def measure_engine(engine: Engine) -> Capacity:
    """Time prompts of several lengths and decodes of several batch sizes."""
    limits, blocks = engine.scheduler.config, engine.blocks
    timed = max(1, min(DECODES, engine.max_model_len // 2 - 2))  # fewer if sequences are very short
    longest = max(1, min(limits.max_num_batched_tokens, engine.max_model_len - timed - 2))
    prompts = _prompt_steps(longest)
    middle = 1 + timed // 2
    fitting = [  # at once in the pool; the first always runs
        (n, min(context, longest))
        for n, context in BATCHES
        if n == 1 or (n <= limits.max_num_seqs and n * blocks.max_blocks(context + timed + 2) <= blocks.num_blocks)
    ]
    decodes = [Step.of_decodes([context + middle] * n) for n, context in fitting]
    steps = [*prompts[:2], decodes[0], *(s for pair in zip(prompts[2:], decodes[1:], strict=False) for s in pair)]
    steps += [s for s in (*prompts, *decodes) if s not in steps]
    token = iter(range(1, 1 << 30))  # first tokens of its own: the prefix cache must not have the prompt
    vocab = engine.model.config.vocab_size

    def new_prompt(length: int) -> tuple[int, ...]:
        number = next(token)
        return (number % vocab, number // vocab % vocab, *[1] * (length - 2))[:length]

    def run(step: Step) -> Took:
        if not step.decodes:
            return Took(*map(sum, zip(*step_times(engine, [new_prompt(step.prompt)], 1), strict=True)))
        context = step.read // step.decodes - middle
        took = step_times(engine, [new_prompt(context) for _ in range(step.decodes)], 2 + timed)
        return Took(*map(min, zip(*(took[1:-1] or took), strict=True)))  # without the prompts, and after the last one

    cost = measure(run, list(dict.fromkeys(steps)), budget_s=BUDGET_S)
    engine.blocks.reset_prefix_cache()
    groups = engine.blocks.groups if engine.config.prefix_cache else ()
    return Capacity(
        cost=cost,
        slots=limits.max_num_seqs,
        step_tokens=limits.max_num_batched_tokens,
        block_size=engine.blocks.block_size,
        groups=groups,
    )


def _took(run: Callable[[], object], on_cpu: bool) -> Took:
    """Time a call. On a CPU the thread that runs it takes part in all of its work; beside a GPU it mostly waits."""
    began, busy = time.perf_counter(), time.thread_time()
    run()
    seconds, busy = time.perf_counter() - began, time.thread_time() - busy
    return Took(seconds, busy if on_cpu and busy > 0 else seconds)


def step_times(engine: Engine, prompts: Sequence[tuple[int, ...]], new: int) -> list[Took]:
    """The times of each step of these requests. The engine has no others."""
    sampling = Sampling(max_tokens=new, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        engine.submit(Request(id=f"measure-{i}", prompt=prompt, sampling=sampling))
    on_cpu, found = engine.runner.device.type == "cpu", list[Took]()
    while engine.has_work:
        found.append(_took(engine.step, on_cpu))
    return found


def measure_encoder(model: Transformer, encode: Callable[[Any, Any], Any], config: EngineConfig) -> Capacity:
    """Time texts of several lengths. An encoder computes one batch after the other."""
    longest = min(model.config.max_len, config.max_model_len or model.config.max_len)
    on_cpu = model.embedding.weight.device.type == "cpu"

    def run(step: Step) -> Took:
        return _took(lambda: encode(model, [(0,) * step.prompt]), on_cpu)

    tokens = config.step_tokens(model.embedding.weight.device.type)
    return Capacity(cost=measure(run, _prompt_steps(longest), budget_s=BUDGET_S), slots=1, step_tokens=tokens)
