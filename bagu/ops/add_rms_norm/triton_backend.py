"""Residual add and RMSNorm on Triton: RMSNorm's kernels with an addend (see there for how they run).

Forward reads x and residual once and writes s and y once; separate ops would read s once more. Backward reads dy, ds
and s and writes one gradient, which is that of x and of residual.
"""

from __future__ import annotations

import torch

from bagu.ops.rms_norm.triton_backend import TUNABLE, add_backward, add_forward

__all__ = ["TUNABLE", "backward", "forward"]


def forward(
    x: torch.Tensor, residual: torch.Tensor, w: torch.Tensor, eps: float,
    *, block_m: int | None = None, programs_per_sm: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    y, s, r = add_forward(x, residual, w, eps, block_m=block_m, programs_per_sm=programs_per_sm, num_warps=num_warps)
    assert s is not None, "add_forward returns s where it is given an addend"
    return y, s, r


def backward(
    dy: torch.Tensor, ds: torch.Tensor, s: torch.Tensor, w: torch.Tensor, r: torch.Tensor, eps: float,
    *, programs_per_sm: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return add_backward(dy, ds, s, w, r, programs_per_sm=programs_per_sm, num_warps=num_warps)
