"""Keys and values in 8 bits, int8 or fp8 (e4m3), with a scale per token and head.

    scale = max |x| / L        q = round(x / scale), ties to even        L = 127 for int8, 448 for fp8

Zeros, tiny numbers, NaN and infinities are as in `quantize_int8`: a row with an invalid number has an invalid scale and
q = 0, so that q * scale is NaN for the whole row.
"""

import torch

from bagu.errors import ArgumentError
from bagu.ops.contract.signature import accumulator

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x[…, D] in an 8-bit dtype, and the scales […] of its rows."""
    wide = x.to(accumulator(x.dtype))
    scale = wide.abs().amax(-1) / LARGEST[dtype]
    scale = torch.where(scale < 2.0**-126, 0.0, scale)
    rows = scale.unsqueeze(-1)
    q = torch.where((rows > 0) & rows.isfinite(), wide / rows, 0.0)
    return (q.round() if dtype == torch.int8 else q).to(dtype), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """q[…, D] * scale[…], in the dtype of the scales."""
    return q.to(scale.dtype) * scale.unsqueeze(-1)


def check_cache(op: str, name: str, cache: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> None:
    """Check that a cache has the dtype of the new tokens and no scales, or 8 bits and scales."""
    if (cache.dtype in LARGEST) != (scale is not None) or (scale is None and cache.dtype != dtype):
        given = "no scales" if scale is None else "scales"
        raise ArgumentError(
            f"{op}: {name} is {cache.dtype} with {given}, and the tokens are {dtype}",
            hint=f"a cache is {dtype} without scales, or int8 or float8_e4m3fn with them",
        )
