"""Other implementations, for the benchmark. No library has this op: Liger's fused head returns only a loss."""

from __future__ import annotations

import torch

from bagu.ops.linear_cross_entropy.spec import Args


def eager(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The usual PyTorch code: all logits in fp32, a gather and a logsumexp. It ignores `memory`."""
    logits = (a.hidden @ a.weight.T).float()
    kept = a.targets != a.ignore_index
    target_logit = logits.gather(-1, torch.where(kept, a.targets, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(kept, target_logit, 0.0), torch.where(kept, logits.logsumexp(-1), 0.0)


def four_gemms(a: Args) -> None:
    """A baseline: only the four products of forward and backward."""
    with torch.no_grad():
        h = a.hidden.flatten(0, -2)
        logits = h @ a.weight.T
        torch.mm(h, a.weight.T, out=logits)
        logits @ a.weight
        logits.T @ h
