"""Other implementations of the same attention, in 16 bits, for the benchmark."""

from __future__ import annotations

from typing import Any

import torch

from bagu.ops.attention import attention, peers

NONE: dict[str, Any] = {"window": None, "slopes": None, "bias": None, "sinks": None, "softcap": None}


def eager(**args: Any) -> torch.Tensor:
    return peers.eager(**args, **NONE)


def cudnn(**args: Any) -> torch.Tensor:
    return peers.cudnn(**args, **NONE)


def bagu_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int, causal: bool,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """A yardstick: our own attention, by its Triton kernels."""
    return attention(q, k, v, cu_seqlens, max_len, causal=causal, scale=scale, backend="triton")[0]
