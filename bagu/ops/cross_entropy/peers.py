"""Implementations in other libraries, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def eager(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    """The usual PyTorch code: fp32 logits, F.cross_entropy, and the z-loss from a separate logsumexp."""
    x = logits.flatten(0, -2).float()
    losses = F.cross_entropy(
        x, targets.flatten(), ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    ).view(targets.shape)
    if z_loss:
        losses = losses + z_loss * x.logsumexp(-1).square().view(targets.shape) * (targets != ignore_index)
    return losses


def liger(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> torch.Tensor:
    """Liger's forward writes the gradient over the logits, and its backward scales it."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(
        logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing, lse_square_scale=z_loss,
    ).view(targets.shape)  # fmt: skip
