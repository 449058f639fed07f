"""A matrix product with an epilogue: y = act(row_scale[m] * column_scale[n] * (x wᵀ) + bias[n]) + residual[m, n].

A program computes several tiles of y, one after another. Rows are read by TMA where they are 16-byte aligned, and
through pointers otherwise. With SPECIALIZE one warp loads and two groups of four warps multiply half the tile's rows
each: int8 4096^3 takes 98 us on an H200, instead of 120 without. Triton 3.6 does so for 4 warps only, and not in a
function with a branch at run time that has an `else`. With FLATTEN the loads of the next tile start before the epilogue
of this one. HALVES finishes the tile in two halves of its columns, which halves the shared memory of the store. Sums
are int32 for int8, fp32 (fp64 for fp64) for floats; fp8 sums are moved to an fp32 accumulator every PARTIAL terms.
"""

import triton
import triton.language as tl


@triton.jit
def _phi_16(z):
    """Phi(z) with a relative error below 3e-5, an eighth of a rounding to fp16: 8 instructions instead of erf's 30.

    log2 Phi(-a) is nearly a parabola. This is its best polynomial of degree 7 on [0, 6], and decreases beyond.
    """
    a = tl.abs(z)
    p = a * -1.6461539e-06 + 5.8331469e-05
    p = p * a - 9.0958568e-04
    p = p * a + 8.4475800e-03
    p = p * a - 5.3887401e-02
    p = p * a - 4.5848128e-01
    p = p * a - 1.1512704e00
    below = tl.exp2(p * a - 9.9998963e-01)
    return tl.where(z < 0.0, below, 1.0 - below)


@triton.jit
def gelu_and_slope_16(z):
    """gelu(z) and its derivative, for results of 16 bits."""
    phi = _phi_16(z)
    return z * phi, phi + z * (0.3989422804014327 * tl.exp2(z * z * -0.7213475204444817))


@triton.jit
def activated(z, ACTIVATION: tl.constexpr, SHORT: tl.constexpr = False):
    """act(z). SHORT: the result is rounded to 16 bits, so fp32's last bits do not matter."""
    if ACTIVATION == "gelu" and SHORT:
        return z * _phi_16(z)
    elif ACTIVATION == "gelu":
        return z * (0.5 + 0.5 * tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        e = tl.exp(-2.0 * 0.7978845608028654 * (z + 0.044715 * z * z * z))
        return z / (1.0 + e)
    elif ACTIVATION == "silu":
        e = tl.exp(-tl.abs(z))  # nothing overflows
        return z * tl.where(z >= 0.0, 1.0, e) / (1.0 + e)
    elif ACTIVATION == "relu":
        return tl.where(z > 0.0, z, z * 0.0)  # a NaN stays one
    else:
        return z


@triton.jit
def tile_of(tile, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The row and column of a tile among the tiles. GROUP rows are computed together, so that w is read from L2."""
    down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = tile // (GROUP * across) * GROUP
    rows = tl.minimum(down - first, GROUP)
    within = tile % (GROUP * across)
    return first + within % rows, within // rows


@triton.jit
def finished(
    total, row, column, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, M, N, ACC: tl.constexpr,
    ACTIVATION: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile of sums at these rows (64-bit) and columns, in ACC."""
    z = total.to(ACC)
    if row_scale_ptr is not None:
        z = z * tl.load(row_scale_ptr + row, row < M, 0.0).to(ACC)[:, None]
    if column_scale_ptr is not None:
        z = z * tl.load(column_scale_ptr + column, column < N, 0.0).to(ACC)[None, :]
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, column < N, 0.0).to(ACC)[None, :]
    z = activated(z, ACTIVATION, SHORT)
    if residual_ptr is not None:
        at = row[:, None] * N + column[None, :]
        z += tl.load(residual_ptr + at, (row < M)[:, None] & (column < N)[None, :], 0.0).to(ACC)
    return z


@triton.jit
def _load(source, first, k, rows, K, stride, ROWS: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, BK]: the columns from k on, zeros beyond the matrix. `source` is a descriptor or a pointer."""
    if TMA:
        return source.load([first, k])
    else:
        r, c = first + tl.arange(0, ROWS), k + tl.arange(0, BK)
        there = (r < rows)[:, None] & (c < K)[None, :]
        return tl.load(
            source + r.to(tl.int64)[:, None] * stride + c[None, :], there, 0.0
        )  # an integer does not convert to fp8


@triton.jit
def _store(
    total, down, n, y_rows, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, y_ptr, M, N, STORE: tl.constexpr,
    ACC: tl.constexpr, ACTIVATION: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """Finish the sums in row `down` of the tiles, from column n on, and store them."""
    BM: tl.constexpr = total.shape[0]
    # Not down * BM + arange: for the second group, SPECIALIZE of Triton 3.6 adds half a tile to the scalar down * BM,
    # since TMA stores at it, and to the arange. Their sum would be rows of the next tile. 64 bits make another scalar.
    row, column = down.to(tl.int64) * BM + tl.arange(0, BM), n + tl.arange(0, total.shape[1])
    z = finished(
        total, row, column, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, M, N, ACC, ACTIVATION, SHORT
    )
    if STORE:
        y_rows.store([down * BM, n], z.to(y_ptr.dtype.element_ty))
    else:
        there = (row < M)[:, None] & (column < N)[None, :]
        tl.store(y_ptr + row[:, None] * N + column[None, :], z, there)


@triton.jit(do_not_specialize=["M"])
def gemm_kernel(
    x_ptr, w_ptr, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, y_ptr, M, N, K, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, TMA: tl.constexpr,
    STORE: tl.constexpr, SPECIALIZE: tl.constexpr, FLATTEN: tl.constexpr, HALVES: tl.constexpr, SUMS: tl.constexpr,
    ACC: tl.constexpr, ACTIVATION: tl.constexpr, SHORT: tl.constexpr, PARTIAL: tl.constexpr = None,
):  # fmt: skip
    if TMA:
        x_rows = tl.make_tensor_descriptor(x_ptr, [M, K], [x_stride, 1], [BM, BK])
        w_rows = tl.make_tensor_descriptor(w_ptr, [N, K], [w_stride, 1], [BN, BK])
    else:
        x_rows, w_rows = x_ptr, w_ptr
    WIDE: tl.constexpr = BN // 2 if HALVES else BN
    if STORE:
        y_rows = tl.make_tensor_descriptor(y_ptr, [M, N], [N, 1], [BM, WIDE])
    else:
        y_rows = y_ptr
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE):
        down, across = tile_of(tile, M, N, BM, BN, GROUP)
        m, n = down * BM, across * BN
        total = tl.zeros([BM, BN], SUMS)
        for k in range(tl.cdiv(K, BK)):
            x = _load(x_rows, m, k * BK, M, K, x_stride, BM, BK, TMA)
            w = _load(w_rows, n, k * BK, N, K, w_stride, BN, BK, TMA)
            total = tl.dot(x, w.T, total, input_precision="ieee", max_num_imprecise_acc=PARTIAL, out_dtype=SUMS)
        if HALVES:
            left, right = total.reshape([BM, 2, WIDE]).permute(0, 2, 1).split()
            _store(left, down, n, y_rows, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, y_ptr, M, N,
                   STORE, ACC, ACTIVATION, SHORT)  # fmt: skip
            _store(right, down, n + WIDE, y_rows, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, y_ptr, M, N,
                   STORE, ACC, ACTIVATION, SHORT)  # fmt: skip
        else:
            _store(total, down, n, y_rows, bias_ptr, row_scale_ptr, column_scale_ptr, residual_ptr, y_ptr, M, N,
                   STORE, ACC, ACTIVATION, SHORT)  # fmt: skip
