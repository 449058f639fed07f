"""Transpose. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.transpose.spec import SPEC


def transpose(x: torch.Tensor, dim0: int, dim1: int, *, backend: str | None = None) -> torch.Tensor:
    """A new contiguous tensor equal to x.transpose(dim0, dim1), of any dtype; negative dims count from the end."""
    return call(SPEC, backend, x=x, dim0=dim0, dim1=dim1)
