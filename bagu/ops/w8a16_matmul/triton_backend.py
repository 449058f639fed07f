"""The linear layer with an 8-bit weight on Triton: for few rows, when reading the weight takes most of the time.

Up to 4 rows are products of a matrix and vectors without tensor cores: programs of 8 rows of w are many enough to have
all reads under way at once. So are rows of more than 16 bits, which no tensor core multiplies exactly, 4 at a time.
More rows of 16 bits are tiles for mma.sync; the weight is widened in registers to the dtype of x. A program sums over
the whole of K, because adding parts in a second launch would take longer at these sizes. The four linear layers of a
0.6B model on an H200, in us for all 28 layers with int8 and fp8:

    rows    vectors       tiles         bf16 weights, cuBLAS
    1       438 | 405                   868
    4       635 | 594     674 | 813     748
    16                    633 | 781     692
    32                    703 | 812     699
"""

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import as_rows, next_power_of_2, triton_acc

FEW_ROWS = 4
VECTOR = {"BN": 8, "BK": 512, "STAGES": 4, "num_warps": 4}
TILE = {"BK": 256, "STAGES": 4, "num_warps": 4}


@triton.jit
def vector_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, x_stride, w_stride, scale_stride, bias_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n, j = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)[None, None, :]
    m = tl.program_id(1).to(tl.int64) * BM + tl.arange(0, BM)
    row, column = tl.minimum(m, M - 1)[:, None, None], tl.minimum(n, N - 1).to(tl.int64)[None, :, None]
    products = tl.zeros([BM, BN, BK], ACC)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_ptr + row * x_stride + k + j, k + j < K, 0.0)
        w = tl.load(w_ptr + column * w_stride + k + j, k + j < K, 0.0)
        products += x.to(ACC) * w.to(ACC)
    total = tl.sum(products, 2) * tl.load(scale_ptr + n * scale_stride, n < N, 0.0).to(ACC)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n * bias_stride, n < N, 0.0).to(ACC)[None, :]
    tl.store(y_ptr + m[:, None] * N + n[None, :], total, (m < M)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=["M"])
def tile_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K, x_stride, w_stride, scale_stride, bias_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    # tiles past the end read the last row again
    row, column = tl.minimum(m, M - 1).to(tl.int64)[:, None], tl.minimum(n, N - 1).to(tl.int64)[:, None]
    j = tl.arange(0, BK)[None, :]
    total = tl.zeros([BM, BN], ACC)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_ptr + row * x_stride + k + j, k + j < K, 0.0)
        w = tl.load(w_ptr + column * w_stride + k + j, k + j < K, 0.0).to(x.dtype)
        total = tl.dot(x, w.T, total, out_dtype=ACC)
    total *= tl.load(scale_ptr + n * scale_stride, n < N, 0.0).to(ACC)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n * bias_stride, n < N, 0.0).to(ACC)[None, :]
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total, (m < M)[:, None] & (n < N)[None, :])


def forward(x: torch.Tensor, w: torch.Tensor, w_scale: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor]:
    y = torch.empty(*x.shape[:-1], w.shape[0], dtype=x.dtype, device=x.device)
    if not y.numel():
        return (y,)
    rows, w = as_rows(x), as_rows(w)
    (M, K), N = rows.shape, w.shape[0]
    args = (
        rows, w, w_scale, bias, y, M, N, K, rows.stride(0), w.stride(0), w_scale.stride(0),
        0 if bias is None else bias.stride(0),
    )  # fmt: skip
    ACC = triton_acc(x.dtype)
    if M <= FEW_ROWS or x.element_size() > 2:
        BM = min(next_power_of_2(M), FEW_ROWS)
        vector_kernel[(triton.cdiv(N, VECTOR["BN"]), triton.cdiv(M, BM))](*args, BM=BM, ACC=ACC, **VECTOR)
        return (y,)
    BM, BN = min(max(next_power_of_2(M), 16), 64), 32 if M <= 16 else 16
    tile_kernel[(triton.cdiv(N, BN), triton.cdiv(M, BM))](*args, BM=BM, BN=BN, ACC=ACC, **TILE)
    return (y,)
