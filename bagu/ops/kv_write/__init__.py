"""New keys or values into their places of a paged cache. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.kv_write.spec import SPEC


def kv_write(cache: torch.Tensor, x: torch.Tensor, slots: torch.Tensor, *, backend: str | None = None) -> None:
    """Write row t of x[*T, G, D] to place `slots[t]` of cache[N, B, G, D], in place: block slots // B, row slots % B.

    Slots lie in [0, N * B). Two rows with one slot leave either of them there, so rows that pad a batch get a slot of
    a block that is never read.
    """
    call(SPEC, backend, cache=cache, x=x, slots=slots)
