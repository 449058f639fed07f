"""One linear layer per expert on Triton: one launch for all experts, without reading the offsets on the host.

The tile of y has as many rows as an expert has on average, from 16 (a decode: reading the weights is the time) to 128.
In invariant mode it has 64 or 128, so that every product is a wgmma instruction, and the same tile of K: the order of a
row's sum depends on the weight alone, as in matmul.

torch._grouped_mm computes dw where it can (bf16, aligned rows): on an H200 it takes 1.04 ms, and the kernel 1.55, for
64 experts of 5760 x 2880 and 8,192 rows; 3.4 and 3.8 ms for 8 of 28672 x 4096. y and dx take
0.71 ms by the kernel and 1.00 by torch for the first, 2.7 to 3.3 and 3.1 for the second, 1.34 and 1.29 to 1.42 for 128
experts of 1536 x 2048; torch's times are without the rows past the last end, which torch._grouped_mm does not write.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton

from bagu.ops.grouped_matmul import torch_backend
from bagu.ops.grouped_matmul.grouped_kernels import rows_kernel, weights_kernel
from bagu.ops.kernels.launch import as_rows, is_hopper, next_power_of_2, num_sms, triton_acc
from bagu.ops.replay.launcher import with_scratch_memory


@dataclass(frozen=True, kw_only=True)
class Tile:
    M: int
    N: int
    K: int  # of the sum
    warps: int
    stages: int
    per_sm: int = 1  # programs


ROWS = (  # by rows of an expert
    Tile(M=16, N=64, K=128, warps=4, stages=3, per_sm=3),
    Tile(M=64, N=128, K=64, warps=4, stages=4, per_sm=2),
    Tile(M=128, N=256, K=64, warps=8, stages=4),
)
WEIGHTS = Tile(M=128, N=256, K=64, warps=8, stages=3)
BOTH: Mapping[str, bool] = MappingProxyType({"x": True, "w": True})  # which gradients are needed
EXACT = Tile(M=32, N=32, K=32, warps=4, stages=1)  # fp32 and fp64, without tensor cores


def _rows_tile(x: torch.Tensor, experts: int, least: int) -> Tile:
    if x.element_size() > 2:
        return EXACT
    return next((t for t in ROWS if least <= t.M and t.M * experts >= x.shape[0]), ROWS[-1])


def _by_tma(x: torch.Tensor) -> bool:
    """Whether TMA can read the rows of a 16-bit x: they are 16-byte aligned, and not one row repeated."""
    aligned = 0 < x.stride(-2) == x.stride(-2) // 8 * 8 and x.data_ptr() % 16 == 0
    return x.element_size() == 2 and aligned and (x.device.type != "cuda" or is_hopper(x.device))


def multiply_rows(
    x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, *, swapped: bool, least: int = 1
) -> torch.Tensor:
    """y [T, N]: each expert's rows of x [T, K] times w[e]ᵀ of [E, N, K], or times w[e] of [E, K, N] if `swapped`. A
    16-bit tile has at least `least` rows."""
    (T, K), E, N = x.shape, w.shape[0], w.shape[2 if swapped else 1]
    y = torch.empty(T, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    x, w = as_rows(x), w if w.stride(2) == 1 else w.contiguous()
    tile = _rows_tile(x, E, least)
    whole = w.stride(0) == w.shape[1] * w.stride(1)  # the experts are one matrix
    # past an expert's weight is the next one: rows of the sum must not be read from there
    tma = tile.M > 16 and whole and _by_tma(x) and _by_tma(w) and not (swapped and K % tile.K)
    tiles = (triton.cdiv(T, tile.M) + E) * triton.cdiv(N, tile.N)  # at most
    launch = rows_kernel[(min(tiles, tile.per_sm * num_sms(x.device)),)]
    (with_scratch_memory(launch) if tma else launch)(
        x, w, offsets.contiguous(), y, T, E, N, K, x.stride(0), w.stride(0), w.stride(1),
        EXPERTS=next_power_of_2(E + 1), BM=tile.M, BN=tile.N, BK=tile.K, TMA=tma, SWAPPED=swapped,
        ACC=triton_acc(x.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def multiply_weights(dy: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """dw [E, N, K]: each expert's rows of dy [T, N], transposed, times its rows of x [T, K]."""
    (T, N), K, E = dy.shape, x.shape[1], offsets.shape[0]
    dw = torch.empty(E, N, K, dtype=x.dtype, device=x.device)
    if not dw.numel():
        return dw
    dy, x = as_rows(dy), as_rows(x)
    tile, tma = WEIGHTS if x.element_size() == 2 else EXACT, _by_tma(x) and _by_tma(dy)
    tiles = E * triton.cdiv(N, tile.M) * triton.cdiv(K, tile.N)
    launch = weights_kernel[(min(tiles, tile.per_sm * num_sms(x.device)),)]
    (with_scratch_memory(launch) if tma else launch)(
        dy, x, offsets.contiguous(), dw, T, E, N, K, dy.stride(0), x.stride(0), BN=tile.M, BK=tile.N, BR=tile.K,
        TMA=tma, ACC=triton_acc(x.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dw


def forward(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor]:
    return (multiply_rows(x, w, offsets, swapped=False),)


def invariant_forward(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> tuple[torch.Tensor]:
    return (multiply_rows(x, w, offsets, swapped=False, least=64),)


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, needs: Mapping[str, bool] = BOTH
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    dx = multiply_rows(dy, w, offsets, swapped=True) if needs["x"] else None
    if not needs["w"]:
        return dx, None
    by_torch = torch_backend.one_launch(dy, x)
    return dx, (torch_backend.multiply_weights if by_torch else multiply_weights)(dy, x, offsets)
