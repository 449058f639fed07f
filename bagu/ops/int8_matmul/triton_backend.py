"""The int8 linear layer on Triton: int8 wgmma with int32 sums, scales, bias and activation in the epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.int8_matmul.spec import Args
from bagu.ops.kernels.gemm import gemm_kernel
from bagu.ops.kernels.launch import as_rows, is_hopper, num_sms
from bagu.ops.replay.launcher import with_scratch_memory


@dataclass(frozen=True, kw_only=True)
class Tile:
    M: int
    N: int
    K: int
    warps: int
    stages: int
    specialize: bool = False  # the warps: one loads, eight multiply
    flatten: bool = False  # the loads of a tile start before the epilogue of the tile before


TILES = (  # by TMA, the largest first: a large tile reads less, a small one occupies more multiprocessors
    Tile(M=128, N=256, K=128, warps=4, stages=3, specialize=True),
    Tile(M=128, N=128, K=128, warps=8, stages=4),
    Tile(M=64, N=128, K=128, warps=4, stages=4),
    Tile(M=64, N=32, K=128, warps=4, stages=6),
)
BY_POINTERS = Tile(M=64, N=64, K=64, warps=4, stages=3)


def _tile(tiles: Sequence[Tile], M: int, N: int, device: torch.device, *, stores: bool) -> Tile:
    """The largest tile that gives work to two thirds of the multiprocessors, or the smallest.

    Only a 16-bit result that TMA `stores` leaves shared memory for a specialized one.
    """
    fits = [t for t in tiles if (M > 64 or t.M == 64) and (stores or not t.specialize)]
    wanted = 2 * num_sms(device) // 3
    return next((t for t in fits if triton.cdiv(M, t.M) * triton.cdiv(N, t.N) >= wanted), fits[-1])


def by_tma(x: torch.Tensor) -> bool:
    """Whether TMA can read the rows of x: they are 16-byte aligned, and not one row repeated."""
    aligned = 0 < x.stride(0) == x.stride(0) // 16 * 16 and x.data_ptr() % 16 == 0
    return aligned and (x.device.type != "cuda" or is_hopper(x.device))


def _packed(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


def byte_product(
    x: torch.Tensor, w: torch.Tensor, x_scale: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None,
    residual: torch.Tensor | None, activation: str | None, y: torch.Tensor, tiles: Sequence[Tile], sums: Any,
) -> None:  # fmt: skip
    """Write act(x_scale * w_scale * (x wᵀ) + bias) + residual to y, of x and w with elements of a byte.

    `sums` is the dtype of the accumulator: int32, or fp32 for fp8.
    """
    if not y.numel():
        return
    x, w = as_rows(x), as_rows(w)
    (M, K), N = x.shape, w.shape[0]
    tma = by_tma(x) and by_tma(w)
    stores = tma and y.element_size() == 2 and N % 8 == 0
    tile = _tile(tiles, M, N, x.device, stores=stores) if tma else BY_POINTERS
    launch = gemm_kernel[(min(triton.cdiv(M, tile.M) * triton.cdiv(N, tile.N), num_sms(x.device)),)]
    (with_scratch_memory(launch) if tma else launch)(
        x, w, _packed(bias), _packed(x_scale), _packed(w_scale), _packed(residual), y, M, N, K, x.stride(0),
        w.stride(0), BM=tile.M, BN=tile.N, BK=tile.K, GROUP=8, TMA=tma,
        STORE=stores, SPECIALIZE=tile.specialize, FLATTEN=tile.flatten,
        HALVES=False, SUMS=sums, ACC=tl.float64 if torch.float64 in (y.dtype, x_scale.dtype) else tl.float32,
        ACTIVATION=activation, SHORT=y.element_size() == 2, PARTIAL=tile.K if x.is_floating_point() else None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def forward(a: Args) -> tuple[torch.Tensor]:
    y = torch.empty(*a.x.shape[:-1], a.w.shape[0], dtype=getattr(torch, a.dtype), device=a.x.device)
    byte_product(a.x, a.w, a.x_scale, a.w_scale, a.bias, None, a.activation, y, TILES, tl.int32)
    return (y,)
