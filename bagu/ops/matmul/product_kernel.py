"""The product kernel: a program computes a tile of y = act(scales * (x wᵀ) + bias) + residual with one loop over K.

The terms of an output are added in the order of K by one instruction kind, so the bits of a row depend neither on the
other rows nor on the tile's rows and columns (`triton_backend.py` says which tiles that holds for).

fp32 and fp64 are added term by term, without tensor cores. There the sums of tiles are added with the rounding error of
each addition carried on (Kahan): one chain over K = 9,000 is 20 roundings off on an H200, a BLAS 2.
"""

import triton
import triton.language as tl

from bagu.ops.kernels.gemm import finished, tile_of


@triton.jit
def _rows_of(ptr, first, rows, K, stride, ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """The rows from `first` on of a matrix of `rows` rows, for `_load`: a pointer, or a TMA descriptor."""
    if TMA:
        return tl.make_tensor_descriptor(ptr, [rows, K], [stride, 1], [ROWS, BK])
    else:
        return ptr + first.to(tl.int64) * stride


@triton.jit
def _load(
    source, first, k, rows, K, stride, ROWS: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr
):
    """[ROWS, BK]: the columns from k on, zeros beyond the matrix."""
    if TMA:
        return source.load([first, k])
    else:
        r, c = tl.arange(0, ROWS), tl.arange(0, BK)
        there = (first + r < rows)[:, None]
        if not EVEN:
            there = there & (k + c < K)[None, :]
        return tl.load(source + r[:, None] * stride + (k + c)[None, :], there, 0.0)


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x_ptr, w_ptr, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride, y_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr, ACTIVATION: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    down, across = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    m, n = down * BM, across * BN
    x_rows = _rows_of(x_ptr, m, M, K, x_stride, BM, BK, TMA)
    w_rows = _rows_of(w_ptr, n, N, K, w_stride, BN, BK, TMA)
    total, lost = tl.zeros([BM, BN], ACC), tl.zeros([BM, BN], ACC)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        x = _load(x_rows, m, k, M, K, x_stride, BM, BK, EVEN, TMA)
        w = _load(w_rows, n, k, N, K, w_stride, BN, BK, EVEN, TMA)
        if x.dtype == ACC:
            term = tl.dot(x, w.T, input_precision="ieee", out_dtype=ACC) - lost
            grown = total + term
            lost = (grown - total) - term
            total = grown
        else:
            total = tl.dot(x, w.T, total, input_precision="ieee", out_dtype=ACC)
    halves = (total,)
    if BN == 256:  # with a residual, registers do not suffice for the epilogue of the whole tile
        halves = total.reshape([BM, 2, BN // 2]).permute(0, 2, 1).split()
    WIDE: tl.constexpr = BN // len(halves)
    row = m.to(tl.int64) + tl.arange(0, BM)
    for h in tl.static_range(len(halves)):
        column = n + h * WIDE + tl.arange(0, WIDE)
        z = finished(
            halves[h], row, column, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, M, N, ACC, ACTIVATION,
            SHORT,
        )  # fmt: skip
        at = row[:, None] * y_stride + column[None, :]
        tl.store(y_ptr + at, z, (row < M)[:, None] & (column < N)[None, :])
