"""Softmax. spec.py has the definition and the cost."""

from collections.abc import Sequence

import torch

from bagu.errors import ArgumentError
from bagu.ops.call.dispatch import call
from bagu.ops.softmax.spec import SPEC


def softmax(
    x: torch.Tensor,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """softmax(scale * x) over the last dim, computed in fp32 and returned in x's dtype.

    `mask` (bool, True = keep) and `lengths` (int: a row keeps its first `length` columns) select the columns; `mask`
    broadcasts to x's shape, and `lengths` to that shape without its last dim. A row without columns is all zeros.
    """
    if isinstance(x, torch.Tensor) and x.ndim:
        mask = _spread("mask", mask, x.shape)
        lengths = _spread("lengths", lengths, x.shape[:-1])
    return call(SPEC, backend, x=x, scale=scale, mask=mask, lengths=lengths)


def _spread(name: str, value: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor | None:
    """A view of `value` in `shape`; a value that is not a tensor is returned, and the signature rejects it."""
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
