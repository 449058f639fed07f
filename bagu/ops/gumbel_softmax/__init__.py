"""Gumbel-softmax. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.gumbel_softmax.spec import SPEC


def gumbel_softmax(
    logits: torch.Tensor, tau: float = 1.0, hard: bool = False, seed: int = 0, *, backend: str | None = None
) -> torch.Tensor:
    """A sample from each row's categorical distribution, relaxed at temperature `tau` > 0 so that gradients flow.

    `hard` returns the one-hot of the same sample, with the gradient of the soft sample. The noise is a function of
    `seed` (0 to 2^63 - 1) and the element's position, so a seed gives the same sample on every backend and in a
    recompute.
    """
    return call(SPEC, backend, logits=logits, tau=tau, hard=hard, seed=seed)
