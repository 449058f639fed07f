"""From a token's target logit and logsumexp to everything a trainer wants of it: the one place that does this."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Losses", "token_losses"]


class Losses(NamedTuple):
    """Per token: what is minimised (cross-entropy plus z-loss), the z-loss in it, and log p(target)."""

    loss: torch.Tensor
    z_loss: torch.Tensor
    logprobs: torch.Tensor


def token_losses(target_logit: torch.Tensor, lse: torch.Tensor, z_loss: float = 0.0) -> Losses:
    """loss = lse - target_logit + z_loss * lse², logprobs = target_logit - lse; differentiable in both.

    An ignored token has 0 for both inputs, and so 0 for all three. The two may also be sums over the ranks of a
    vocabulary-parallel head.
    """
    z = z_loss * lse.square() if z_loss else torch.zeros_like(lse)  # 0 * inf is NaN
    return Losses(loss=lse - target_logit + z, z_loss=z, logprobs=target_logit - lse)
