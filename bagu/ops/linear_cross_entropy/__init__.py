"""A linear head for cross-entropy that does not keep the logits. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.linear_cross_entropy.losses import Losses, token_losses
from bagu.ops.linear_cross_entropy.spec import SPEC

__all__ = ["Losses", "linear_cross_entropy", "token_losses"]


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ignore_index: int = -100,
    memory: int | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (target_logit, lse) of each token in fp32, differentiable, and 0 where the target is `ignore_index`.

    `memory` limits the bytes of logits, or of their gradients, that exist at one time (by default 16 MiB and at least
    512 tokens on a CPU, 2 GiB elsewhere), and so the tokens per chunk. `token_losses` computes loss, z-loss and
    logprobs from the two results.
    """
    return call(SPEC, backend, hidden=hidden, weight=weight, targets=targets, ignore_index=ignore_index, memory=memory)
