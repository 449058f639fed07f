"""Sampling of tokens. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.sample.spec import SPEC

MOST_ROWS = 65_535  # of a launch: the second dim of a CUDA grid


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
    args: dict[str, torch.Tensor | None] = {
        "logits": logits,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "u": u,
    }
    args |= {"ids": ids, "values": values, "allowed": allowed}
    if len(logits) <= MOST_ROWS:
        return call(SPEC, backend, **args)
    SPEC.bind(args)  # tensors of unequal lengths are refused before they are split
    pieces = (
        {k: None if t is None else t[at : at + MOST_ROWS] for k, t in args.items()}
        for at in range(0, len(logits), MOST_ROWS)
    )
    return torch.cat([call(SPEC, backend, **piece) for piece in pieces])
