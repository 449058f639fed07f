"""SwiGLU on Triton: the gated kernels with s = sigmoid."""

import torch

from bagu.ops.kernels.gated_kernels import TUNABLE as TUNABLE
from bagu.ops.kernels.gated_kernels import run_backward, run_forward


def forward(
    x: torch.Tensor, up: torch.Tensor | None, *, block: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor]:
    return run_forward("silu", x, up, block, num_warps)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor | None,
    *,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return run_backward("silu", dy, x, up, block, num_warps)
