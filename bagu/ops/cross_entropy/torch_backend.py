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


def forward(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The losses, and lse in two parts, as in the Triton backend."""
    kept = a.targets != a.ignore_index
    x = torch.where(kept.unsqueeze(-1), a.logits, 0.0).to(accumulator(a.logits.dtype))
    high = x.detach().amax(-1)
    base = torch.where(high.isinf(), 0.0, high)  # inf - inf is NaN
    rest = (x - base.unsqueeze(-1)).exp_().sum(-1).log()
    # differences from the maximum first: lse - target would lose `rest` to rounding if the logits are large
    loss = rest + (1 - a.label_smoothing) * (base - target_logits(x, a.targets))
    if a.label_smoothing:  # 0 * -inf is NaN
        loss = loss + a.label_smoothing * (base - x.mean(-1))
    if a.z_loss:
        loss = loss + a.z_loss * (base + rest).square()
    return torch.where(kept, loss, 0.0), base, rest


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    targets = a.targets
    rows, count = at_least_two_rows(a.logits), targets.numel()
    losses, base, rest = forward(a._replace(logits=rows, targets=targets.reshape(-1).expand(len(rows))))
    return losses[:count].view(targets.shape), base[:count].view(targets.shape), rest[:count].view(targets.shape)


def backward(a: Args, dlosses: torch.Tensor, base: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor]:
    logits = a.logits
    V, g = logits.shape[-1], dlosses.unsqueeze(-1)
    p = (logits.to(base.dtype) - base.unsqueeze(-1)).sub_(rest.unsqueeze(-1)).exp_()
    d = g * (1 + 2 * a.z_loss * (base + rest).unsqueeze(-1)) * p if a.z_loss else g * p
    if a.label_smoothing:
        d = d - g * (a.label_smoothing / V)
    word = torch.arange(V, device=logits.device)
    d = torch.where(word == a.targets.unsqueeze(-1), d - g * (1 - a.label_smoothing), d)
    return (torch.where((a.targets != a.ignore_index).unsqueeze(-1), d, 0.0).to(logits.dtype),)
