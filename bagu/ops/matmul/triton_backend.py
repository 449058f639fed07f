"""A linear layer on Triton, in two kernels with one epilogue (kernels/gemm.py), and one for decode steps.

`forward`: a few 16-bit rows without an epilogue are multiplied by few_rows.py, more of them by the persistent kernel if
TMA can read them; all others as in invariant mode.

`invariant_forward`: the bits of a row do not depend on the number of rows. cuBLAS chooses its kernel, and with it the
order of a sum, by the number of rows. Here the order depends on the weight alone: K is not split, its tile is BK for
every number of rows, and every 16-bit tile has 64 rows or more, so that all products are wgmma instructions (a tile of
16 rows would be mma.sync, which may round differently). The tile's rows and columns, the loads (pointers or TMA) and
the stages are free. fp32 and fp64 have one tile for all sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from bagu.ops.attention.block_sizes import reads_by_tma
from bagu.ops.kernels.gemm import gemm_kernel
from bagu.ops.kernels.launch import as_rows, next_power_of_2, num_sms, triton_acc
from bagu.ops.matmul import few_rows
from bagu.ops.matmul.product_kernel import product_kernel
from bagu.ops.matmul.spec import Args, is_decode
from bagu.ops.matmul.torch_backend import backward as backward
from bagu.ops.replay.launcher import with_scratch_memory

BK = 64


@dataclass(frozen=True, kw_only=True)
class Tile:
    M: int
    N: int
    warps: int
    stages: int
    tma: bool = False


@dataclass(frozen=True, kw_only=True)
class Persistent:
    """A tile of the persistent kernel."""

    M: int
    N: int
    warps: int
    stages: int
    per_sm: int  # programs on a multiprocessor
    group: int  # rows of tiles that are computed together


@dataclass(frozen=True, kw_only=True)
class Epilogue:
    """What is applied to x wᵀ. Its tensors are contiguous."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None
    activation: str | None = None


# On an H200 the first takes 190, 1,551 and 1,634 us for 4096^3, 8192^3 and 8192 x 4096 x 16384 with gelu, the second
# 207, 1,650 and 1,708. Two programs of the second are on a multiprocessor, so that the epilogue of one overlaps with
# the products of the other, but it reads its operands more often.
PERSISTENT = (
    Persistent(M=128, N=256, warps=8, stages=3, per_sm=1, group=16),
    Persistent(M=128, N=128, warps=4, stages=3, per_sm=2, group=8),
)
TUNABLE = {"forward": {"tile": tuple(range(len(PERSISTENT)))}}  # the tests run every value

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


def by_tma(x: torch.Tensor) -> bool:
    """Whether TMA can read the rows of x: they are 16-byte aligned, and not one row repeated."""
    return reads_by_tma(x) and 0 < x.stride(0) == x.stride(0) // 8 * 8 and x.data_ptr() % 16 == 0


def product(x: torch.Tensor, w: torch.Tensor, end: Epilogue, y: torch.Tensor) -> torch.Tensor:
    """Write x[M, K] w[N, K]ᵀ after its epilogue to y[M, N], which may be wider than x, and return y."""
    x, w = as_rows(x), as_rows(w)
    (M, K), N = x.shape, w.shape[0]
    if M * N == 0:
        return y
    tile = _tile(M, N, x.element_size(), x.device)
    wide = BK if x.element_size() == 2 else EXACT.N
    wide = min(wide, max(16, next_power_of_2(K)))
    tma = tile.tma and by_tma(x) and by_tma(w)
    if not tma and max(tile.M * x.stride(0), tile.N * w.stride(0)) >= 1 << 31:  # the offsets in a tile are 32 bits
        x, w = x.contiguous(), w.contiguous()
    launch = product_kernel[(triton.cdiv(M, tile.M) * triton.cdiv(N, tile.N),)]
    (with_scratch_memory(launch) if tma else launch)(
        x, w, end.bias, end.row_scale, end.column_scale, end.residual, y, M, N, K, x.stride(0), w.stride(0),
        y.stride(0), BM=tile.M, BN=tile.N, BK=wide, GROUP=8, EVEN=K % wide == 0, TMA=tma, STAGES=tile.stages,
        ACC=triton_acc(x.dtype), ACTIVATION=end.activation, SHORT=y.element_size() == 2, num_warps=tile.warps,
    )  # fmt: skip
    return y


def persistent_product(x: torch.Tensor, w: torch.Tensor, end: Epilogue, y: torch.Tensor, tile: Persistent) -> None:
    """Write x[M, K] w[N, K]ᵀ after its epilogue to y[M, N]. TMA can read x and w and write y."""
    (M, K), N = x.shape, w.shape[0]
    tiles = triton.cdiv(M, tile.M) * triton.cdiv(N, tile.N)
    launch = gemm_kernel[(min(tiles, tile.per_sm * num_sms(x.device)),)]
    with_scratch_memory(launch)(
        x, w, end.bias, end.row_scale, end.column_scale, end.residual, y, M, N, K, x.stride(0), w.stride(0),
        BM=tile.M, BN=tile.N, BK=BK, GROUP=tile.group, TMA=True, STORE=True, SPECIALIZE=False, FLATTEN=True,
        HALVES=True, SUMS=tl.float32, ACC=tl.float32, ACTIVATION=end.activation, SHORT=True,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _persistent(M: int, N: int, device: torch.device) -> Persistent | None:
    """The tile of the persistent kernel; None if there are too few tiles for the multiprocessors."""
    tile = PERSISTENT[0]
    return tile if 3 * triton.cdiv(M, tile.M) * triton.cdiv(N, tile.N) >= 2 * num_sms(device) else None


def _epilogue(
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    column_scale: torch.Tensor | None,
    activation: str | None,
) -> Epilogue:
    def packed(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.contiguous()

    return Epilogue(
        bias=packed(bias),
        residual=packed(residual),
        row_scale=packed(row_scale),
        column_scale=packed(column_scale),
        activation=activation,
    )


def forward(a: Args, *, tile: int | None = None) -> tuple[torch.Tensor]:
    x, N = a.x, len(a.w)
    rows, weight = as_rows(x), as_rows(a.w)
    M = len(rows)
    y = torch.empty(*x.shape[:-1], N, dtype=x.dtype, device=x.device)
    end = _epilogue(a.bias, a.residual, a.row_scale, a.column_scale, a.activation)
    if tile is None and is_decode({**vars(end), "x": x, "w": a.w}):
        few_rows.product(rows, weight, end.bias, y)
        return (y,)
    chosen = _persistent(M, N, x.device) if tile is None else PERSISTENT[tile]
    # Triton assumes nothing of sizes that are no multiple of 16, and then needs more shared memory than there is
    aligned = N % 16 == 0 and rows.stride(0) % 16 == 0 and weight.stride(0) % 16 == 0
    if M * N == 0 or chosen is None or x.element_size() != 2 or not (aligned and by_tma(rows) and by_tma(weight)):
        return invariant_forward(a)
    persistent_product(rows, weight, end, y, chosen)
    return (y,)


def invariant_forward(a: Args) -> tuple[torch.Tensor]:
    x = a.x
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y = torch.empty(*x.shape[:-1], a.w.shape[0], dtype=x.dtype, device=x.device)
    end = _epilogue(a.bias, a.residual, a.row_scale, a.column_scale, a.activation)
    product(rows, a.w, end, y.view(len(rows), a.w.shape[0]))
    return (y,)
