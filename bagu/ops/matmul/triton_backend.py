"""A linear layer on Triton, for invariant mode: the bits of a row do not depend on the number of rows.

cuBLAS chooses its kernel, and with it the order of a sum, by the number of rows. Here the order depends on the weight
alone: K is not split, its tile is BK for every number of rows, and every 16-bit tile has 64 rows or more, so that all
products are wgmma instructions (a tile of 16 rows would be mma.sync, which may round differently). The tile's rows and
columns, the loads (pointers or TMA) and the stages are free. fp32 and fp64 have one tile for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from bagu.ops.attention.block_sizes import reads_by_tma
from bagu.ops.launch import as_rows, next_power_of_2, num_sms, triton_acc
from bagu.ops.launcher import with_scratch_memory
from bagu.ops.matmul.product_kernel import product_kernel
from bagu.ops.matmul.torch_backend import backward

__all__ = ["backward", "forward", "invariant_forward", "product"]

BK = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    M: int
    N: int
    warps: int
    stages: int
    tma: bool = False


TILES = (  # 16 bits, the largest first: a large tile reads less, a small one occupies more multiprocessors
    Tile(M=128, N=256, warps=8, stages=3, tma=True),
    Tile(M=128, N=128, warps=8, stages=4, tma=True),
    Tile(M=64, N=128, warps=4, stages=4),
    Tile(M=64, N=64, warps=4, stages=5),
    Tile(M=64, N=32, warps=4, stages=6),
    Tile(M=64, N=16, warps=4, stages=6),
)
EXACT = Tile(M=32, N=32, warps=4, stages=1)  # fp32 and fp64, without tensor cores


def _tile(M: int, N: int, itemsize: int, device: torch.device) -> Tile:
    """The largest tile that gives work to two thirds of the multiprocessors, or the smallest."""
    if itemsize > 2:
        return EXACT
    fits = [t for t in TILES if M > 64 or t.M == 64]
    wanted = 2 * num_sms(device) // 3
    return next((t for t in fits if triton.cdiv(M, t.M) * triton.cdiv(N, t.N) >= wanted), fits[-1])


def _by_tma(x: torch.Tensor) -> bool:
    """Whether TMA can read the rows of x: they are 16-byte aligned, and not one row repeated."""
    return reads_by_tma(x) and 0 < x.stride(0) == x.stride(0) // 8 * 8 and x.data_ptr() % 16 == 0


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> torch.Tensor:
    """Write x[M, K] w[N, K]ᵀ + bias to y[M, N], which may be wider than x, and return y."""
    x, w = as_rows(x), as_rows(w)
    (M, K), N = x.shape, w.shape[0]
    if M * N == 0:
        return y
    tile = _tile(M, N, x.element_size(), x.device)
    wide = BK if x.element_size() == 2 else EXACT.N
    wide = min(wide, max(16, next_power_of_2(K)))
    tma = tile.tma and _by_tma(x) and _by_tma(w)
    launch = product_kernel[(triton.cdiv(M, tile.M) * triton.cdiv(N, tile.N),)]
    (with_scratch_memory(launch) if tma else launch)(
        x, w, None if bias is None else bias.contiguous(), y, M, N, K, x.stride(0), w.stride(0), y.stride(0),
        BM=tile.M, BN=tile.N, BK=wide, GROUP=8, EVEN=K % wide == 0, TMA=tma, STAGES=tile.stages,
        ACC=triton_acc(x.dtype), num_warps=tile.warps,
    )  # fmt: skip
    return y


def forward(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = torch.empty(*x.shape[:-1], w.shape[0], dtype=x.dtype, device=x.device)
    product(rows, w, bias, y.view(len(rows), w.shape[0]))
    return (y,)


invariant_forward = forward
