"""Other implementations, for the benchmark. No library has this op: Liger's fused head returns only a loss."""

from __future__ import annotations

import torch


def eager(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int, memory: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual PyTorch code: all logits in fp32, a gather and a logsumexp. It ignores `memory`."""
    logits = (hidden @ weight.T).float()
    kept = targets != ignore_index
    target_logit = logits.gather(-1, torch.where(kept, targets, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(kept, target_logit, 0.0), torch.where(kept, logits.logsumexp(-1), 0.0)


def four_gemms(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, ignore_index: int, memory: int | None
) -> None:
    """A baseline: only the four products of forward and backward."""
    with torch.no_grad():
        h = hidden.flatten(0, -2)
        logits = h @ weight.T
        torch.mm(h, weight.T, out=logits)
        logits @ weight
        logits.T @ h
