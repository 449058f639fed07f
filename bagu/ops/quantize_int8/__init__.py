"""Quantization to int8. What it means and costs is in spec.py."""

from __future__ import annotations

import torch

from bagu.ops.dispatch import call
from bagu.ops.quantize_int8.spec import SPEC


def quantize_int8(
    x: torch.Tensor, granularity: str = "row", *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(q, scale) with x ≈ q * scale: symmetric, the largest |x| of a group becoming ±127. No gradient.

    `granularity` says what shares a scale: the whole "tensor" (scale [1]), each "row" (scale [*M], the last dim being
    the row) or each "channel" (scale [N], the last dim being the channels).
    """
    return call(SPEC, backend, x=x, granularity=granularity)
