"""The messages from rank 0 to the other ranks, in the order in which an engine sends them."""

from typing import NamedTuple

import torch

from bagu.nn.config import ModelConfig
from bagu.serve.config import EngineConfig
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.plan import Plan


class Setup(NamedTuple):
    """The model. Rank 0 then sends this rank's part of each tensor, in this order."""

    model: ModelConfig
    engine: EngineConfig
    dtype: torch.dtype  # of the parameters that are created
    tensors: dict[str, torch.dtype]  # of the state dict


class Cache(NamedTuple):
    """The KV pool that every rank creates, for its heads."""

    num_blocks: int
    block_size: int
    groups: tuple[LayerGroup, ...]
    max_model_len: int


class Step(NamedTuple):
    """Run this plan (without its sequences, which only rank 0 has). If it refers to `late` tokens of the previous step,
    rank 0 broadcasts them first."""

    plan: Plan
    late: int


class Logits(NamedTuple):
    """Project this many hidden states, which rank 0 broadcasts."""

    rows: int


class Logprobs(NamedTuple):
    """Compute the logprobs of targets: rank 0 broadcasts this many hidden states, then the targets."""

    rows: int
