"""Implementations in other libraries, for the benchmark."""

import torch
import torch.nn.functional as F


def eager(logits: torch.Tensor, tau: float, hard: bool, seed: int) -> torch.Tensor:
    """PyTorch's gumbel_softmax. It takes no seed, so every call draws different noise."""
    return F.gumbel_softmax(logits, tau=tau, hard=hard)
