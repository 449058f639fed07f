"""The time of the engine's decode steps at a given batch and context, for labs."""

import statistics
import time
from typing import Literal

import torch

from bagu.nn import Transformer
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling

BLOCK = 16
CHUNK = 8192  # prompt tokens per step


def decode_step_s(
    model: Transformer,
    *,
    batch: int,
    context: int,
    steps: int,
    kv_dtype: Literal["auto", "int8"] = "auto",
    invariant: bool = False,
) -> float:
    """The median of `steps` decode steps of `batch` sequences with about `context` tokens each.

    Prompts are read in chunks, and the first sequences generate while the last prompts are read, so they are up to one
    token per chunk longer.
    """
    chunks = -(-batch * context // CHUNK)
    answer = steps + chunks + 2
    config = EngineConfig(
        num_blocks=batch * (-(-(context + answer) // BLOCK) + 1),
        block_size=BLOCK,
        max_num_seqs=batch,
        max_num_batched_tokens=max(batch, CHUNK),
        prefix_cache=False,
        kv_dtype=kv_dtype,
        invariant=invariant,
    )
    engine, generator = Engine(model, None, config), torch.Generator().manual_seed(0)
    for i in range(batch):
        prompt = torch.randint(model.config.vocab_size, (context,), generator=generator).tolist()
        engine.submit(Request(id=str(i), prompt=tuple(prompt), sampling=Sampling(max_tokens=answer, temperature=0.0)))
    started: set[str] = set()
    while len(started) < batch:
        started |= {event.request_id for event in engine.step()}
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()  # the tokens of a step are on the host when it returns; on a GPU those of the step before
        times.append(time.perf_counter() - began)
    return statistics.median(times)
