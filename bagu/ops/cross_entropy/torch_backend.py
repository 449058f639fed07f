"""Cross-entropy in PyTorch: for CPUs and torch.compile, and as readable formulas."""

from __future__ import annotations

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.cross_entropy.spec import Args
from bagu.ops.invariant.mode import at_least_two_rows


def target_logits(x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """x[m, targets[m]], and NaN where the target is outside the vocabulary."""
    inside = (targets >= 0) & (targets < x.shape[-1])
    word = torch.where(inside, targets, 0).long().unsqueeze(-1)
    return torch.where(inside, x.gather(-1, word).squeeze(-1), torch.nan)


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    kept = a.targets != a.ignore_index
    x = torch.where(kept.unsqueeze(-1), a.logits, 0.0).to(accumulator(a.logits.dtype))
    lse = x.logsumexp(-1)
    loss = lse - (1 - a.label_smoothing) * target_logits(x, a.targets)
    if a.label_smoothing:  # 0 * -inf is NaN
        loss = loss - a.label_smoothing * x.mean(-1)
    if a.z_loss:
        loss = loss + a.z_loss * lse.square()
    return torch.where(kept, loss, 0.0), lse


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    targets = a.targets
    rows, count = at_least_two_rows(a.logits), targets.numel()
    losses, lse = forward(a._replace(logits=rows, targets=targets.reshape(-1).expand(len(rows))))
    return losses[:count].view(targets.shape), lse[:count].view(targets.shape)


def backward(a: Args, dlosses: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor]:
    logits = a.logits
    V, g, total = logits.shape[-1], dlosses.unsqueeze(-1), lse.unsqueeze(-1)
    p = (logits.to(lse.dtype) - total).exp()
    d = g * (1 + 2 * a.z_loss * total) * p if a.z_loss else g * p
    if a.label_smoothing:
        d = d - g * (a.label_smoothing / V)
    word = torch.arange(V, device=logits.device)
    d = torch.where(word == a.targets.unsqueeze(-1), d - g * (1 - a.label_smoothing), d)
    return (torch.where((a.targets != a.ignore_index).unsqueeze(-1), d, 0.0).to(logits.dtype),)
