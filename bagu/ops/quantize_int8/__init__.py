"""Quantization to int8. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.quantize_int8.spec import SPEC


def quantize_int8(
    x: torch.Tensor, granularity: str = "row", *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (q, scale) with x ≈ q * scale: symmetric; the largest |x| of a group becomes ±127. No gradient.

    `granularity` selects the elements that share a scale: the whole "tensor" (scale [1]), each "row" (scale [*M]; the
    last dim is the row) or each "channel" (scale [N]; the last dim is the channels).
    """
    return call(SPEC, backend, x=x, granularity=granularity)
