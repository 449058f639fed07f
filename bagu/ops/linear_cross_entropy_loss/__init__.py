"""The loss of a linear head, with its gradients computed in the same pass. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.linear_cross_entropy_loss.spec import SPEC


def linear_cross_entropy_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    token_weights: torch.Tensor | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    memory: int | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (loss, target_logit, lse): a scalar to call backward on, and two per-token constants for `token_losses`.

    loss = sum of token_weights * (lse - target_logit + z_loss * lse²); without weights, the mean over the tokens that
    are not ignored (0 if all are). Put known factors into the weights: 1 / the number of tokens of several batches, an
    advantage. The weights get no gradient. `memory`: see `linear_cross_entropy`.
    """
    wants = [torch.is_grad_enabled() and isinstance(t, torch.Tensor) and t.requires_grad for t in (hidden, weight)]
    return call(
        SPEC, backend, hidden=hidden, weight=weight, targets=targets, token_weights=token_weights,
        ignore_index=ignore_index, z_loss=z_loss, memory=memory,
        grad_hidden=wants[0], grad_weight=wants[1],
    )  # fmt: skip
