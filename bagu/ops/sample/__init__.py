"""Sampling of tokens. spec.py has the definition and the cost."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.sample.spec import SPEC


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    u: torch.Tensor,
    ids: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """A token for each row of logits[S, V], int64. Every other argument has one entry per row.

    The token is a function of the row, its parameters and its random number `u` in [0, 1). Temperature 0 is greedy;
    top_k >= V, top_p = 1 and min_p = 0 keep every token. `values[s, a]`, in fp32, replaces the logit of token
    `ids[s, a]`; ids ascend, and unused entries at the end are -1. `allowed[s, v // 32]` has a bit for each token v, the
    lowest for the first: a token without it is not sampled.
    """
    args = {"logits": logits, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "u": u}
    return call(SPEC, backend, **args, ids=ids, values=values, allowed=allowed)
