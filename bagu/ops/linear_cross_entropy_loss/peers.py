"""Other implementations, for the benchmark. Results that an implementation does not return are empty."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bagu.ops.linear_cross_entropy_loss.spec import Args

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def eager(a: Args) -> Results:
    """The usual PyTorch code: all logits in fp32, F.cross_entropy, a weighted sum."""
    logits, t = (a.hidden @ a.weight.T).flatten(0, -2).float(), a.targets.flatten()
    losses = F.cross_entropy(logits, t, ignore_index=a.ignore_index, reduction="none")
    if a.z_loss:
        losses = losses + a.z_loss * logits.logsumexp(-1).square() * (t != a.ignore_index)
    kept = (t != a.ignore_index).sum()
    loss = losses.sum() / kept if a.token_weights is None else (losses * a.token_weights.flatten()).sum()
    return loss, losses.new_empty(0), losses.new_empty(0)


def liger(a: Args) -> Results:
    """Liger's fused head. It has no token weights: all tokens have equal weight, as in the bench cases."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(
        a.hidden.flatten(0, -2), a.weight, a.targets.flatten(), ignore_index=a.ignore_index, lse_square_scale=a.z_loss
    )
    return loss, loss.new_empty(0), loss.new_empty(0)


def three_gemms(a: Args) -> None:
    """A baseline: only the three products of forward and backward."""
    with torch.no_grad():
        h = a.hidden.flatten(0, -2)
        logits = h @ a.weight.T
        logits @ a.weight
        logits.T @ h
