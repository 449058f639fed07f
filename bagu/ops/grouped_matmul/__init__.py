"""One linear layer per group of rows. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.grouped_matmul.spec import SPEC


def grouped_matmul(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Rows offsets[e-1] … offsets[e] of x[T, K] times w[e].T, for every expert e of w[E, N, K]: the layer of an MoE.

    `offsets` (int32, on x's device) holds the end of each expert's rows, ascending; an expert may have none. Rows past
    the last end come back as zeros. The values are read on the device and not checked there.
    """
    return call(SPEC, backend, x=x, w=w, offsets=offsets)
