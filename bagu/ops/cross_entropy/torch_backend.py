"""Cross-entropy in PyTorch: for CPUs and torch.compile, and as readable formulas."""

from __future__ import annotations

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.invariant.mode import at_least_two_rows


def target_logits(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """x[m, targets[m]], and NaN where the target is outside the vocabulary."""
    inside = (targets >= 0) & (targets < x.shape[-1])
    word = torch.where(inside, targets, 0).long().unsqueeze(-1)
    return torch.where(inside, x.gather(-1, word).squeeze(-1), torch.nan)


def forward(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = targets != ignore_index
    x = torch.where(kept.unsqueeze(-1), logits, 0.0).to(accumulator(logits.dtype))
    lse = x.logsumexp(-1)
    loss = lse - (1 - label_smoothing) * target_logits(x, targets)
    if label_smoothing:  # 0 * -inf is NaN
        loss = loss - label_smoothing * x.mean(-1)
    if z_loss:
        loss = loss + z_loss * lse.square()
    return torch.where(kept, loss, 0.0), lse


def invariant_forward(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, count = at_least_two_rows(logits), targets.numel()
    losses, lse = forward(rows, targets.reshape(-1).expand(len(rows)), ignore_index, label_smoothing, z_loss)
    return losses[:count].view(targets.shape), lse[:count].view(targets.shape)


def backward(
    dlosses: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, lse: torch.Tensor,
    ignore_index: int, label_smoothing: float, z_loss: float,
) -> tuple[torch.Tensor]:  # fmt: skip
    V, g, total = logits.shape[-1], dlosses.unsqueeze(-1), lse.unsqueeze(-1)
    p = (logits.to(lse.dtype) - total).exp()
    d = g * (1 + 2 * z_loss * total) * p if z_loss else g * p
    if label_smoothing:
        d = d - g * (label_smoothing / V)
    word = torch.arange(V, device=logits.device)
    d = torch.where(word == targets.unsqueeze(-1), d - g * (1 - label_smoothing), d)
    return (torch.where((targets != ignore_index).unsqueeze(-1), d, 0.0).to(logits.dtype),)
