"""Other implementations of the same attention, in 16 bits, for the benchmark."""

from __future__ import annotations

import torch

from bagu.ops.attention import attention, peers
from bagu.ops.int8_attention.spec import NO_TERMS, Args


def eager(a: Args) -> torch.Tensor:
    return peers.eager(**a._asdict(), **NO_TERMS)


def cudnn(a: Args) -> torch.Tensor:
    return peers.cudnn(**a._asdict(), **NO_TERMS)


def bagu_attention(a: Args) -> torch.Tensor:
    """A yardstick: our own attention, by its Triton kernels."""
    return attention(**a._asdict(), backend="triton")[0]
