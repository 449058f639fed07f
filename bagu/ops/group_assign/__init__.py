"""Tokens choose groups, and a group is the mean of its tokens. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.group_assign.spec import SPEC


def group_assign(
    scores: torch.Tensor,
    values: torch.Tensor,
    *,
    tau: float = 1.0,
    hard: bool = True,
    noise: bool = False,
    seed: int = 0,
    eps: float = 1.0,
    backend: str | None = None,
) -> torch.Tensor:
    """[B, G, D]: the mean of values[B, T, D] over the tokens of each group, for scores[B, T, G].

    Every token chooses a group, by a softmax at temperature `tau` over the groups; `hard` gives it to the best group
    alone, with the gradient of the soft choice. `noise` adds Gumbel noise, a function of `seed` and the element's
    position: a sample, for training. `eps` is added to the number of a group's tokens, so that an empty group is 0.
    """
    return call(SPEC, backend, scores=scores, values=values, tau=tau, hard=hard, noise=noise, seed=seed, eps=eps)
