"""ScaleNorm on Triton: the kernels of kernels/norms.py, where g is a weight of one number."""

import torch

from bagu.ops.kernels.norms import forward_tile, run_backward, run_forward

TUNABLE = {  # the tests run every combination
    "forward": {"block_m": (1, 2, 8), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8)},
}


def forward(
    x: torch.Tensor, g: torch.Tensor, eps: float, *, block_m: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, _, norm = run_forward("scale", x, g, eps, forward_tile(x, block_m, num_warps))
    return y, norm


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    *,
    programs_per_sm: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dg, _ = run_backward("scale", dy, x, g, norm, eps, programs_per_sm, num_warps)
    return dx, dg
