"""Implementations in other libraries, for the benchmark."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.cross_entropy.spec import Args


def eager(a: Args) -> torch.Tensor:
    """The usual PyTorch code: fp32 logits, F.cross_entropy, and the z-loss from a separate logsumexp."""
    targets = a.targets
    x = a.logits.flatten(0, -2).float()
    losses = F.cross_entropy(
        x, targets.flatten(), ignore_index=a.ignore_index, label_smoothing=a.label_smoothing, reduction="none"
    ).view(targets.shape)
    if a.z_loss:
        losses = losses + a.z_loss * x.logsumexp(-1).square().view(targets.shape) * (targets != a.ignore_index)
    return losses


def liger(a: Args) -> torch.Tensor:
    """Liger's forward writes the gradient over the logits, and its backward scales it."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy(
        a.logits.flatten(0, -2),
        a.targets.flatten(),
        ignore_index=a.ignore_index,
        reduction="none",
        label_smoothing=a.label_smoothing,
        lse_square_scale=a.z_loss,
    ).view(a.targets.shape)
