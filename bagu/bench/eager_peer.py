"""The model's plain forward as a peer of `bagu bench engine --streams 1`: the whole prompt in eager PyTorch, without an
engine and without a KV cache. It shows what the engine gains on prompts."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import torch

from bagu.bench.engine_timing import Case
from bagu.errors import ArgumentError
from bagu.machine.openmp import settings
from bagu.nn.model import Transformer

EAGER = "eager"


def check_eager(case: Case, device: torch.device) -> None:
    """Raise before anything is timed if the peer cannot run this measurement."""
    if case.streams != (1,) or device.type != "cpu":
        raise ArgumentError("the peer eager measures one prompt on a CPU", hint="add --streams 1 --device cpu")


def eager_row(model: Transformer, case: Case) -> dict[str, Any]:
    """The median of the repeats, after one warmup. Without a cache every token needs a forward of all tokens before it,
    so the decode rate is that of the first token after the prompt."""
    seconds = statistics.median([_seconds(model, case, repeat) for repeat in range(case.repeats + 1)][1:])
    return {
        "implementation": EAGER, "streams": 1, "tokens_per_s": 1 / seconds,
        "prompt_tokens_per_s": case.prompt / seconds, "openmp": settings(os.environ),
    }  # fmt: skip


@torch.inference_mode()
def _seconds(model: Transformer, case: Case, repeat: int) -> float:
    (prompt,) = case.streams_workload(1, model.config.vocab_size, repeat).prompts
    began = time.perf_counter()
    ids, positions = torch.tensor(prompt), torch.arange(case.prompt)
    hidden = model(ids, positions, torch.tensor([0, case.prompt], dtype=torch.int32), case.prompt).hidden
    model.logits(hidden[-1:]).argmax().item()
    return time.perf_counter() - began
