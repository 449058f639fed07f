"""One linear layer per group of rows (MoE experts). spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.grouped_matmul.spec import SPEC


def grouped_matmul(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Multiply rows offsets[e-1] … offsets[e] of x[T, K] by w[e].T, for every expert e of w[E, N, K] (MoE).

    `offsets` (int32, on x's device) holds the end of each expert's rows, ascending; an expert may have no rows. Rows
    past the last end are zeros in the result. The values of `offsets` are read on the device and not checked.
    """
    return call(SPEC, backend, x=x, w=w, offsets=offsets)
