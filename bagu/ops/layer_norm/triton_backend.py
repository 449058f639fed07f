"""LayerNorm on Triton: the kernels of kernels/norms.py."""

import torch

from bagu.ops.kernels.launch import next_power_of_2, num_sms, split_row
from bagu.ops.kernels.norms import Tile, run_backward, run_forward

TUNABLE = {  # the tests run every combination
    "forward": {"block_m": (1, 2), "programs_per_sm": (None, 2), "num_warps": (4, 8)},
    "backward": {"programs_per_sm": (1, 2), "num_warps": (4, 8, 16)},
}


def forward(
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    eps: float,
    *,
    block_m: int | None = None,
    programs_per_sm: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, mean, rstd = run_forward("layer", x, w, eps, forward_tile(x, block_m, programs_per_sm, num_warps), b=b)
    assert mean is not None, "run_forward returns the mean for a LayerNorm"
    return y, mean, rstd


def invariant_forward(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row per program, whatever the number of rows."""
    return forward(x, w, b, eps, block_m=1)


def forward_tile(
    x: torch.Tensor, block_m: int | None = None, per_sm: int | None = None, num_warps: int | None = None
) -> Tile:
    """A program owns several rows if N is short or a power of two up to 8,192, and there are rows for all programs."""
    M, N = x.shape[:-1].numel(), x.shape[-1]
    one_row = next_power_of_2(N) >= 2048 and block_m in (None, 1)
    block_n, tail = split_row(N, 2) if one_row else (next_power_of_2(N), 0)
    if one_row and (block_n != N or N > 8192):
        programs, warps = _long_rows(block_n, tail, N % 16 == 0)
        return Tile(block_m=1, block_n=block_n, tail=tail, num_warps=num_warps or warps, per_sm=per_sm or programs)
    most = min(2 if block_n == 8192 else 8192 // block_n, M // (4 * num_sms(x.device)))
    block_m = block_m or 1 << max(most, 1).bit_length() - 1
    warps = num_warps or min(max(block_m * block_n // 2048, 1), 16)
    return Tile(block_m=block_m, block_n=block_n, tail=tail, num_warps=warps, per_sm=per_sm)


def _long_rows(block: int, tail: int, aligned: bool) -> tuple[int, int]:
    """Programs per multiprocessor and warps per program, for rows longer than 8,192 or not a power of two (H200, bf16,
    swept at N = 5,120: 92 us at (6, 4), 109 with one program per row; 4,095: 106 at (4, 2), 164; 8,193: 180 at (2, 4),
    254).
    """
    if block > 8192:
        return 1, 8
    if not aligned:
        return (4, 2) if block <= 4096 else (2, 4)
    if tail and block < 8192:
        return 6, 4
    if tail:
        return (4, 4) if tail < 4096 else (1, 8)
    return (8, 2) if block == 2048 else (4, 4)


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    b: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    eps: float,
    *,
    programs_per_sm: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    return run_backward("layer", dy, x, w, rstd, eps, programs_per_sm, num_warps, mean=mean, b=b)
