"""The same work by other libraries, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def eager(logits: torch.Tensor, tau: float, hard: bool, seed: int) -> torch.Tensor:
    """PyTorch's own, which draws other noise: it takes no seed, so its sample is another one each call."""
    return F.gumbel_softmax(logits, tau=tau, hard=hard)
