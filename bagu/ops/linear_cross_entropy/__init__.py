"""A linear head and what cross-entropy needs of it, without keeping the logits. What it means is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
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
    """(target_logit, lse) of each token in fp32, both differentiable and both 0 where the target is `ignore_index`.

    `memory` is how many bytes of logits may exist at a time (by default 16 MiB and 512 tokens at least on a CPU, 2 GiB
    elsewhere): it sets how many tokens are done at once. `token_losses` makes loss, z-loss and logprobs from the two.
    """
    return call(SPEC, backend, hidden=hidden, weight=weight, targets=targets, ignore_index=ignore_index, memory=memory)
