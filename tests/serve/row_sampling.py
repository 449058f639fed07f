"""Sampling of rows without an engine, for tests."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np
import torch

from bagu.serve.changes import Row, adjusts, changes
from bagu.serve.request import Sampling
from bagu.serve.sample import sample
from bagu.serve.slots import Slots


class Choice(NamedTuple):
    """A choice of a request whose next token is sampled."""

    sampling: Sampling
    seed: int
    choice: int
    tokens: Sequence[int]  # prompt and output
    num_prompt: int
    stops: Set[int] = frozenset()  # the tokens that end the output


def sample_rows(logits: torch.Tensor, rows: Sequence[Choice]) -> torch.Tensor:
    """A token for each row of the logits, as the engine's sampler would sample it."""
    V = logits.shape[1]
    slots = Slots(V)
    at = np.array([slots.add(r.sampling, r.seed, r.choice, r.num_prompt) for r in rows])
    parameters = slots.parameters(at, np.array([len(r.tokens) for r in rows]))
    given = [Row(r.sampling, r.tokens, r.num_prompt, r.stops) if adjusts(r.sampling) else None for r in rows]
    return sample(
        logits, parameters, changes(given, V), lambda *arrays: [torch.from_numpy(a).to(logits.device) for a in arrays]
    )
