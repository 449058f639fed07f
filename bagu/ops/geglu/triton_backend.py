"""GeGLU on Triton: the gated kernels with s = Phi, or its tanh approximation."""

import torch

from bagu.ops.kernels.gated_kernels import TUNABLE as TUNABLE
from bagu.ops.kernels.gated_kernels import run_backward, run_forward

KIND = {"tanh": "gelu_tanh", "none": "gelu"}


def forward(
    x: torch.Tensor,
    up: torch.Tensor | None,
    approximate: str,
    *,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor]:
    return run_forward(KIND[approximate], x, up, block, num_warps)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor | None,
    approximate: str,
    *,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return run_backward(KIND[approximate], dy, x, up, block, num_warps)
