"""Other implementations, for the benchmark. Results that an implementation does not return are empty."""

from __future__ import annotations

import torch
import torch.nn.functional as F

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def eager(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor | None,
    ignore_index: int, z_loss: float, memory: int | None, grad_hidden: bool, grad_weight: bool,
) -> Results:  # fmt: skip
    """The usual PyTorch code: all logits in fp32, F.cross_entropy, a weighted sum."""
    logits, t = (hidden @ weight.T).flatten(0, -2).float(), targets.flatten()
    losses = F.cross_entropy(logits, t, ignore_index=ignore_index, reduction="none")
    if z_loss:
        losses = losses + z_loss * logits.logsumexp(-1).square() * (t != ignore_index)
    kept = (t != ignore_index).sum()
    loss = losses.sum() / kept if token_weights is None else (losses * token_weights.flatten()).sum()
    return loss, losses.new_empty(0), losses.new_empty(0)


def liger(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor | None,
    ignore_index: int, z_loss: float, memory: int | None, grad_hidden: bool, grad_weight: bool,
) -> Results:  # fmt: skip
    """Liger's fused head. It has no token weights: all tokens have equal weight, as in the bench cases."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss = liger_fused_linear_cross_entropy(
        hidden.flatten(0, -2), weight, targets.flatten(), ignore_index=ignore_index, lse_square_scale=z_loss
    )
    return loss, loss.new_empty(0), loss.new_empty(0)


def three_gemms(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, token_weights: torch.Tensor | None,
    ignore_index: int, z_loss: float, memory: int | None, grad_hidden: bool, grad_weight: bool,
) -> None:  # fmt: skip
    """A baseline: only the three products of forward and backward."""
    with torch.no_grad():
        h = hidden.flatten(0, -2)
        logits = h @ weight.T
        logits @ weight
        logits.T @ h
