"""Loss, z-loss and logprob of a token from its target logit and logsumexp. No other code computes them."""

from typing import NamedTuple

import torch


class Losses(NamedTuple):
    """Per token: the minimised loss (cross-entropy plus z-loss), the z-loss part of it, and log p(target)."""

    loss: torch.Tensor
    z_loss: torch.Tensor
    logprobs: torch.Tensor


def token_losses(target_logit: torch.Tensor, lse: torch.Tensor, z_loss: float = 0.0) -> Losses:
    """loss = lse - target_logit + z_loss * lse², logprobs = target_logit - lse; differentiable in both inputs.

    For an ignored token both inputs are 0, and so are all three results. The inputs may also be sums over the ranks of
    a vocabulary-parallel head.
    """
    z = z_loss * lse.square() if z_loss else torch.zeros_like(lse)  # 0 * inf is NaN
    return Losses(loss=lse - target_logit + z, z_loss=z, logprobs=target_logit - lse)
