"""Residual add and RMSNorm on Triton: RMSNorm with an addend (kernels/norms.py).

Forward reads x and residual once and writes s and y once; separate ops would read s once more. Backward reads dy, ds
and s and writes one gradient, which belongs to both x and residual.
"""

import torch

from bagu.ops.kernels.norms import forward_tile, run_backward, run_forward

TUNABLE = {  # the tests run every combination
    "forward": {"block_m": (1, 2), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8, 16)},
}


def forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    *,
    block_m: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, s, _, r = run_forward("rms", x, w, eps, forward_tile(x, block_m, num_warps), addend=residual)
    assert s is not None, "run_forward returns s where it is given an addend"
    return y, s, r


def backward(
    dy: torch.Tensor,
    ds: torch.Tensor,
    s: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    eps: float,
    *,
    programs_per_sm: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw, _ = run_backward("rms", dy, s, w, r, eps, programs_per_sm, num_warps, ds=ds)
    return dx, dw
