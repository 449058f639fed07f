"""Matrix products for few rows, in all three layouts of a linear layer, with epilogues of a block around them.

    forward     z = x wᵀ + bias, act(z), act(gate) * z, + residual
    backward    dx = dz w (+ what the residual brings), dz = (dy w) act'(z), dw = dzᵀ x with dbias = sum of dz's rows

cuBLAS is faster on a GPU with many rows. With few, the host is the limit: a call of cuBLAS takes an H200's host 19 to
45 us, a replayed launch 6. A program computes one tile with one loop over the terms of its sums. Operands are read
through pointers with two strides, so that one kernel has every layout.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.gated_kernels import step
from bagu.ops.kernels.gemm import activated, gelu_and_slope_16, tile_of
from bagu.ops.kernels.launch import triton_acc


@triton.jit
def _sums(
    a_ptr, b_ptr, row, column, M, N, K, a_row, a_term, b_term, b_column, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, COUNT: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The tile of a[M, K] b[K, N] at these rows and columns; and, with COUNT, the sums of a's rows in 16 columns."""
    total, sums = tl.zeros([BM, BN], ACC), tl.zeros([BM, 16], ACC)
    ones = tl.full([BK, 16], 1.0, tl.float32).to(a_ptr.dtype.element_ty)
    a_rows, b_columns = a_ptr + row.to(tl.int64)[:, None] * a_row, b_ptr + column.to(tl.int64)[None, :] * b_column
    for start in tl.range(0, K, BK, num_stages=STAGES):
        k = (start + tl.arange(0, BK)).to(tl.int64)
        a = tl.load(a_rows + k[None, :] * a_term, (row < M)[:, None] & (k < K)[None, :], 0.0)
        b = tl.load(b_columns + k[:, None] * b_term, (k < K)[:, None] & (column < N)[None, :], 0.0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC)
        if COUNT:
            sums = tl.dot(a, ones, sums, input_precision="ieee", out_dtype=ACC)
    return total, sums


@triton.jit
def product_kernel(
    a_ptr, b_ptr, bias_ptr, gate_ptr, up_ptr, residual_ptr, z_ptr, y_ptr, dgate_ptr, sum_ptr, M, N, K, a_row, a_term,
    b_term, b_column, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """y[M, N] from a[M, K] b[K, N]. All matrices besides a and b are contiguous [M, N]."""
    down, across = tile_of(tl.program_id(0), M, N, BM, BN, 8)
    row, column = down * BM + tl.arange(0, BM), across * BN + tl.arange(0, BN)
    COUNT: tl.constexpr = sum_ptr is not None
    SHORT: tl.constexpr = y_ptr.dtype.element_ty.primitive_bitwidth == 16
    z, sums = _sums(a_ptr, b_ptr, row, column, M, N, K, a_row, a_term, b_term, b_column, BM, BN, BK, STAGES, COUNT, ACC)
    there = (row < M)[:, None] & (column < N)[None, :]
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    if COUNT:
        tl.store(sum_ptr + row, tl.sum(sums, 1) * 0.0625, (row < M) & (across == 0))
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, column < N, 0.0).to(ACC)[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + at, z, there)
    if BACKWARD:  # z is the gradient of act(gate) * up
        g = tl.load(gate_ptr + at, there, 0.0).to(ACC)
        if ACTIVATION == "relu":
            value, slope = tl.maximum(g, 0.0), tl.where(g > 0.0, 1.0, 0.0)
        elif ACTIVATION == "gelu" and SHORT:
            value, slope = gelu_and_slope_16(g)
        else:
            s, ds = step(g, ACTIVATION)
            value, slope = g * s, s + g * ds
        if up_ptr is not None:
            up = tl.load(up_ptr + at, there, 0.0).to(ACC)
            tl.store(dgate_ptr + at, z * up * slope, there)
            z = z * value
        else:
            z = z * slope
    elif gate_ptr is not None:
        z = z * activated(tl.load(gate_ptr + at, there, 0.0).to(ACC), ACTIVATION, SHORT)
    else:
        z = activated(z, ACTIVATION, SHORT)
    if residual_ptr is not None:
        z += tl.load(residual_ptr + at, there, 0.0).to(ACC)
    tl.store(y_ptr + at, z, there)


@dataclass(frozen=True, kw_only=True)
class Tile:
    M: int
    N: int
    K: int  # terms
    warps: int
    stages: int


# Swept on an H200 at 1,024 rows (docs/journal/009): 1.2 to 1.8 times cuBLAS's time
FORWARD = Tile(M=128, N=64, K=64, warps=8, stages=3)
BACKWARD = Tile(M=64, N=128, K=64, warps=4, stages=3)
EXACT = Tile(M=32, N=32, K=32, warps=4, stages=1)  # fp32 and fp64, without tensor cores


def _product(
    tile: Tile, a: torch.Tensor, b: torch.Tensor, y: torch.Tensor, *, bias: Any = None, gate: Any = None,
    up: Any = None, residual: Any = None, z: Any = None, dgate: Any = None, sums: Any = None,
    activation: str | None = None, backward: bool = False,
) -> None:  # fmt: skip
    (M, K), N = a.shape, b.shape[1]
    if M * N == 0:
        return
    bias, gate, up, residual = (None if t is None else t.contiguous() for t in (bias, gate, up, residual))
    tile = tile if a.element_size() == 2 else EXACT
    product_kernel[(triton.cdiv(M, tile.M) * triton.cdiv(N, tile.N),)](
        a, b, bias, gate, up, residual, z, y, dgate, sums, M, N, K, *a.stride(), *b.stride(), BM=tile.M, BN=tile.N,
        BK=tile.K, STAGES=tile.stages, ACTIVATION=activation, BACKWARD=backward, ACC=triton_acc(a.dtype),
        num_warps=tile.warps,
    )  # fmt: skip


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    activation: str | None = None,
) -> None:
    """y = act(x wᵀ + bias) + residual, or act(gate) * (x wᵀ + bias) + residual; `z` receives x wᵀ + bias."""
    _product(FORWARD, x, w.T, y, bias=bias, gate=gate, residual=residual, z=z, activation=activation)


def input_gradient(
    dy: torch.Tensor, w: torch.Tensor, dx: torch.Tensor, *, residual: torch.Tensor | None = None
) -> None:
    """dx = dy w + residual."""
    _product(BACKWARD, dy, w, dx, residual=residual)


def activated_gradient(
    dy: torch.Tensor,
    w: torch.Tensor,
    activation: str,
    gate: torch.Tensor,
    dz: torch.Tensor,
    *,
    up: torch.Tensor | None = None,
    dgate: torch.Tensor | None = None,
) -> None:
    """With dh = dy w: dz = dh act'(gate); or, with `up`, dgate = dh up act'(gate) and dz = dh act(gate)."""
    tile = BACKWARD if up is None else FORWARD
    _product(tile, dy, w, dz, gate=gate, up=up, dgate=dgate, activation=activation, backward=True)


def weight_gradients(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, needs_w: bool, needs_bias: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of a weight and of its bias."""
    needs_bias = needs_bias and bias is not None
    if not needs_w and not needs_bias:
        return None, None
    dw, dbias = w.new_empty(w.shape), dy.new_empty(w.shape[0]) if needs_bias else None
    _product(BACKWARD, dy.T, x, dw, sums=dbias)
    return dw if needs_w else None, dbias
