"""Gated units on Triton. They are memory-bound: each byte moves once, in loads of 16 bytes.

A program computes one tile of rows and features. Contiguous separate tensors are viewed as one long row, so that only
the last tile is partial. Forward saves nothing; backward recomputes s(g), which costs an exp and saves a tensor:

    y = g * s * up        dup = dy * g * s        dgate = dy * up * (s + g * s')

When gate and up are packed, dgate and dup are written directly into the two halves of dx.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.gated import halves
from bagu.ops.kernels.early import start
from bagu.ops.kernels.launch import as_rows, next_power_of_2, starts_early, triton_acc

TUNABLE = {  # tests run each value
    "forward": {"block": (128, 2048), "num_warps": (4, 8)},
    "backward": {"block": (128, 2048), "num_warps": (4, 8)},
}


@triton.jit
def step(g, KIND: tl.constexpr):
    """s(g) and its slope. s is sigmoid(g) for silu, Phi(g) for gelu, sigmoid(2z) = (1 + tanh z) / 2 for gelu_tanh.

    With e = exp(-|a|), sigmoid(a) is 1 / (1 + e) or e / (1 + e), and its slope is e / (1 + e)^2. Nothing overflows, and
    no term is 1 - sigmoid(a), which cancels where sigmoid(a) is near 1.
    """
    if KIND == "gelu":
        s = 0.5 + 0.5 * tl.erf(g * 0.7071067811865476)
        slope = 0.3989422804014327 * tl.exp(-0.5 * g * g)
    else:
        a = g
        if KIND == "gelu_tanh":  # 2z = 2 * sqrt(2 / pi) * (g + 0.044715 g^3)
            a = 1.5957691216057308 * g * (1.0 + 0.044715 * g * g)
        e = tl.exp(-tl.abs(a))
        p = 1.0 / (1.0 + e)
        s = tl.where(a >= 0.0, p, e * p)
        slope = e * p * p
        if KIND == "gelu_tanh":
            slope *= 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    return s, slope


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The rows, features and mask of this program. Indices are 64-bit: a long row can exceed 2^31 features."""
    across = tl.cdiv(N, BLOCK_N)
    m = (tl.program_id(0) // across).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = (tl.program_id(0) % across).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    return m, n, (m < M) & (n < N)


@triton.jit(do_not_specialize=["M"])
def _forward(
    g_ptr, u_ptr, y_ptr, M, N, g_stride, u_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start(EARLY)
    m, n, real = _tile(M, N, BLOCK_M, BLOCK_N)
    g = tl.load(g_ptr + m * g_stride + n, real, 0.0).to(ACC)
    u = tl.load(u_ptr + m * u_stride + n, real, 0.0).to(ACC)
    s, _ = step(g, KIND)
    tl.store(y_ptr + m * N + n, g * s * u, real)


@triton.jit(do_not_specialize=["M"])
def _backward(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, M, N, dy_stride, g_stride, u_stride, dx_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m, n, real = _tile(M, N, BLOCK_M, BLOCK_N)
    dy = tl.load(dy_ptr + m * dy_stride + n, real, 0.0).to(ACC)
    g = tl.load(g_ptr + m * g_stride + n, real, 0.0).to(ACC)
    u = tl.load(u_ptr + m * u_stride + n, real, 0.0).to(ACC)
    s, slope = step(g, KIND)
    tl.store(du_ptr + m * dx_stride + n, dy * g * s, real)
    tl.store(dg_ptr + m * dx_stride + n, dy * u * (s + g * slope), real)


def _rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Each tensor as [M, N], or as [1, M * N] if all are contiguous."""
    rows = [as_rows(t) for t in tensors]
    return [r.view(1, -1) for r in rows] if all(r.is_contiguous() for r in rows) else rows


def _block(rows: torch.Tensor) -> int:
    """Values per tile. Unaligned rows move one value at a time; with more than four values per thread, their addresses
    use so many registers that few threads fit (odd N on an H200, backward: 0.84 of copy bandwidth with four, else 0.62)
    """
    return 2048 if rows.shape[1] % 8 == 0 else 512


def run_forward(
    kind: str, x: torch.Tensor, up: torch.Tensor | None, block: int | None, num_warps: int | None
) -> tuple[torch.Tensor]:
    """y for the step `kind`: silu, gelu or gelu_tanh."""
    gate, up = halves(x, up)
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if not y.numel():
        return (y,)
    g, u = _rows(gate, up)
    M, N = g.shape
    block = block or _block(g)
    block_n = min(block, next_power_of_2(N))
    block_m = block // block_n
    early = starts_early(x.device, rows=x.shape[:-1].numel())
    _forward[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        g, u, y, M, N, g.stride(0), u.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, KIND=kind, ACC=triton_acc(x.dtype), EARLY=early,
        num_warps=num_warps or 4, launch_pdl=early,
    )  # fmt: skip
    return (y,)


def run_backward(
    kind: str, dy: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, block: int | None, num_warps: int | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx, dup); dup is None where gate and up are packed in x."""
    gate, u = halves(x, up)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dup = None if up is None else torch.empty_like(dx)
    if not dy.numel():
        return dx, dup
    # if packed, dgate and dup are halves of each row of dx, so dx cannot be viewed as one long row
    dys, g, u = _rows(dy, gate, u) if up is not None else [as_rows(t) for t in (dy, gate, u)]
    M, N = g.shape
    warps = num_warps or (8 if _block(g) == 2048 else 4)
    block = block or _block(g)
    dg, du = halves(dx.view(M, -1), None if dup is None else dup.view(M, -1))
    block_n = min(block, next_power_of_2(N))
    block_m = block // block_n
    _backward[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
        dys, g, u, dg, du, M, N, dys.stride(0), g.stride(0), u.stride(0), dg.stride(0),
        BLOCK_M=block_m, BLOCK_N=block_n, KIND=kind, ACC=triton_acc(x.dtype),
        num_warps=warps,
    )  # fmt: skip
    return dx, dup
