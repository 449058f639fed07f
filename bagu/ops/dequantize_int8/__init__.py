"""int8 dequantization. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.dequantize_int8.spec import SPEC


def dequantize_int8(
    q: torch.Tensor,
    scale: torch.Tensor,
    granularity: str = "row",
    dtype: torch.dtype = torch.bfloat16,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """q * scale in `dtype`, computed in fp32: the inverse of `quantize_int8` at the same `granularity`. No gradient."""
    return call(SPEC, backend, q=q, scale=scale, granularity=granularity, dtype=str(dtype).removeprefix("torch."))
