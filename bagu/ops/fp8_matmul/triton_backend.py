"""The fp8 linear layer on Triton: fp8 wgmma, with the launch and the epilogue of the int8 one.

The instruction's sums have about 14 bits. Each tile of K is summed by itself and added in fp32.
"""

from __future__ import annotations

import torch
import triton.language as tl

from bagu.ops.fp8_matmul.spec import Args
from bagu.ops.int8_matmul.triton_backend import Tile, by_tma, byte_product
from bagu.ops.kernels.launch import as_rows

TILES = (  # the largest first. A tile of 128 x 256 has no registers for the second sum.
    Tile(M=128, N=128, K=128, warps=8, stages=4, flatten=True),
    Tile(M=64, N=128, K=128, warps=4, stages=4),
    Tile(M=64, N=32, K=128, warps=4, stages=6),
)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """The rows of x, copied if TMA cannot read them."""
    rows = as_rows(x)
    return rows if by_tma(rows) else rows.clone(memory_format=torch.contiguous_format)


def forward(a: Args) -> tuple[torch.Tensor]:
    y = torch.empty(*a.x.shape[:-1], a.w.shape[0], dtype=getattr(torch, a.dtype), device=a.x.device)
    byte_product(
        _readable(a.x), _readable(a.w), a.x_scale, a.w_scale, a.bias, a.residual, a.activation, y, TILES, tl.float32
    )
    return (y,)
