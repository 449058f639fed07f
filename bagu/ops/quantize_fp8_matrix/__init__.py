"""Quantization of a matrix to fp8 in both layouts. spec.py has the definition and the cost."""

from typing import Literal

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.quantize_fp8_matrix.spec import SPEC


def quantize_fp8_matrix(
    x: torch.Tensor,
    amax: torch.Tensor | None = None,
    *,
    dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn",
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (q, t, scale) with x ≈ q * scale: q[M, K] and its transpose t[K, M] in fp8, one scale. No gradient.

    The largest |x| becomes the largest number of `dtype`. `amax[P]` are the largest |x| of parts of x, where a caller
    has them; without it they are computed.
    """
    return call(SPEC, backend, x=x, amax=amax, dtype=dtype)
