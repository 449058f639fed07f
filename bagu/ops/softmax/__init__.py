"""Softmax. What it means and costs is in spec.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bagu.errors import ArgumentError
from bagu.ops.dispatch import call
from bagu.ops.softmax.spec import SPEC


def softmax(
    x: torch.Tensor,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(scale * x) over the last dim, in fp32 inside and in x's dtype outside.

    `mask` (bool, True = keep) and `lengths` (int: a row sees its first so many columns) say which columns take part;
    both broadcast, to x's shape and to that shape without its last dim. A row with nothing to see is all zeros.
    """
    if isinstance(x, torch.Tensor) and x.ndim:
        mask = _spread("mask", mask, x.shape)
        lengths = _spread("lengths", lengths, x.shape[:-1])
    return call(SPEC, backend, x=x, scale=scale, mask=mask, lengths=lengths)


def _spread(name: str, value: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor | None:
    """A view of `value` in `shape`; what is no tensor is left for the signature to refuse."""
    if not isinstance(value, torch.Tensor):
        return value
    fits = value.ndim <= len(shape) and all(
        have in (1, want) for have, want in zip(reversed(value.shape), reversed(shape), strict=False)
    )
    if not fits:
        raise ArgumentError(
            f"softmax: {name} has shape {list(value.shape)}, which does not broadcast to {list(shape)}",
            hint=f"signature: {SPEC.signature}; give each dim of {name} its size in x, or 1",
        )
    return value.expand(*shape)
