"""Rank 0 of an engine with tp > 1: its part of the model, and a runner that tells the other ranks what it runs.

Only rank 0 has requests, scheduler and sampler, so prefix cache, preemption and abort are as with one process: the
other ranks see plans. A plan has a few numbers per token and sequence; a step also exchanges what
parallel/inference.py lists.
"""

from dataclasses import replace

import torch
import torch.distributed as dist

from bagu.errors import ArgumentError
from bagu.nn.model import Transformer
from bagu.parallel.tensor import check_sizes
from bagu.serve.config import EngineConfig
from bagu.serve.kv.paged import PagedKV
from bagu.serve.runner import Runner, RunnerOutput
from bagu.serve.tp.group import Ranks
from bagu.serve.tp.messages import Cache, Logits, Logprobs, Setup, Step
from bagu.serve.tp.parts import send_parts
from bagu.serve.ways import Staged


def start_ranks(model: Transformer, config: EngineConfig, device: torch.device) -> tuple[Ranks, Transformer]:
    """Start the other ranks and send them their parts of `model`; returns them and the part of rank 0."""
    check_sizes(model.config, config.tp)
    if not model.config.causal or model.config.attention == "linear":
        raise ArgumentError(f"engine: tp = {config.tp} needs a causal model with softmax attention", hint="use tp=1")
    ranks = Ranks(config.tp, device)
    try:
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        ranks.send(Setup(model.config, config, model.embedding.weight.dtype, dtypes))
        with ranks.explained():
            return ranks, send_parts(model, ranks.mesh)
    except BaseException:
        ranks.close()
        raise


class LeadRunner(Runner):
    """The runner of rank 0. Each call is sent to the other ranks, which make the same collectives."""

    def __init__(self, model: Transformer, kv: PagedKV, config: EngineConfig, max_model_len: int, ranks: Ranks) -> None:
        self.ranks = ranks
        ranks.send(Cache(kv.num_blocks, kv.block_size, kv.groups, max_model_len))
        super().__init__(model, kv, config, max_model_len, ranks.mesh)

    def launch(self, staged: Staged, late: torch.Tensor | None = None) -> RunnerOutput:
        tokens = late if staged.plan.late else None
        self.ranks.send(Step(replace(staged.plan, slices=[], sampled=[]), 0 if tokens is None else len(tokens)))
        with self.ranks.explained():
            if tokens is not None:
                dist.broadcast(tokens, 0)
            return super().launch(staged, late)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.ranks.send(Logits(len(hidden)))
        with self.ranks.explained():
            dist.broadcast(hidden.contiguous(), 0)
            return super().logits(hidden)

    def logprobs(self, hidden: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        self.ranks.send(Logprobs(len(hidden)))
        with self.ranks.explained():
            dist.broadcast(hidden.contiguous(), 0)
            dist.broadcast(targets.contiguous(), 0)
            return super().logprobs(hidden, targets, logits)
