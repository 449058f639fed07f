"""RMSNorm on Triton: the kernels of kernels/norms.py."""

import torch

from bagu.ops.kernels.norms import forward_tile, run_backward, run_forward

TUNABLE = {  # the tests run every combination
    "forward": {"block_m": (1, 2), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8, 16)},
}


def forward(
    x: torch.Tensor, w: torch.Tensor, eps: float, *, block_m: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, _, r = run_forward("rms", x, w, eps, forward_tile(x, block_m, num_warps))
    return y, r


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    r: torch.Tensor,
    eps: float,
    *,
    programs_per_sm: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw, _ = run_backward("rms", dy, x, w, r, eps, programs_per_sm, num_warps)
    return dx, dw
