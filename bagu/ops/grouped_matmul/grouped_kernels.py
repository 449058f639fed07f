"""Products of each expert's rows: y = x w[e]ᵀ (or x w[e], for dx), and dw[e] = dyᵀ x.

The numbers of rows are on the device, and the host does not wait for them. In `rows_kernel` every program computes from
the offsets how many tiles each expert has, and takes a share of all tiles. The rows past the last end are those of one
more expert, whose product has no terms: their tiles are zeros. `weights_kernel` has the same number of tiles for each
expert, with a sum over the expert's rows; an expert without rows has zeros.

Rows are read by TMA where they are 16-byte aligned, and through pointers otherwise. A tile that goes past an expert's
last row reads rows of the next: `rows_kernel` does not store them, and `weights_kernel` reads its last rows through
pointers, with a mask.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(source, first, column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, COLUMNS] from row `first` and from `column` on; zeros past `rows` and `columns`, by TMA past the tensor.
    `source` is a descriptor or a pointer."""
    if TMA:
        return source.load([first, column])
    else:
        r, c = first + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        there = (r < rows)[:, None] & (c < columns)[None, :]
        return tl.load(source + r.to(tl.int64)[:, None] * stride + c[None, :], there, 0.0)


@triton.jit
def _add_product(a, b, total, lost, ACC: tl.constexpr):
    """total + a b. fp32 and fp64 have no tensor cores; there `lost` carries the rounding error of each addition on
    (Kahan), since one chain of 9,000 terms is 20 roundings off."""
    if a.dtype == ACC:
        term = tl.dot(a, b, input_precision="ieee", out_dtype=ACC) - lost
        grown = total + term
        error = (grown - total) - term
        return grown, tl.where(error == error, error, 0.0)  # inf - inf
    else:
        return tl.dot(a, b, total, input_precision="ieee", out_dtype=ACC), lost


@triton.jit
def _rows_of(offsets_ptr, expert, T, E):
    """The first row of an expert, or of several, and the end of its rows. Expert E has the rows past the last end. No
    offset is larger than T, so that wrong ones do not lead out of the tensors."""
    begin = tl.load(offsets_ptr + expert - 1, (expert > 0) & (expert <= E), 0)
    end = tl.load(offsets_ptr + expert, expert < E, 0)
    return tl.minimum(begin, T), tl.where(expert == E, T, tl.minimum(end, T))


@triton.jit(do_not_specialize=["T"])
def rows_kernel(
    x_ptr, w_ptr, offsets_ptr, y_ptr, T, E, N, K, x_stride, w_expert, w_stride, EXPERTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, SWAPPED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """x [T, K], y [T, N]; w [E, N, K], or [E, K, N] if SWAPPED."""
    e = tl.arange(0, EXPERTS)
    begins, ends = _rows_of(offsets_ptr, e, T, E)
    down, across = tl.cdiv(ends - begins, BM), tl.cdiv(N, BN)  # tiles
    upto = tl.cumsum(down) * across
    if TMA:
        x_rows = tl.make_tensor_descriptor(x_ptr, [T, K], [x_stride, 1], [BM, BK])
        if SWAPPED:
            w_rows = tl.make_tensor_descriptor(w_ptr, [E * K, N], [w_stride, 1], [BK, BN])
        else:
            w_rows = tl.make_tensor_descriptor(w_ptr, [E * N, K], [w_stride, 1], [BN, BK])
    for tile in range(tl.program_id(0), tl.sum(down) * across, tl.num_programs(0)):
        expert = tl.sum((upto <= tile).to(tl.int32))
        begin, end = _rows_of(offsets_ptr, expert, T, E)
        within, high = tile - tl.sum(tl.where(e < expert, down, 0)) * across, tl.cdiv(end - begin, BM)
        m, n = begin + within % high * BM, within // high * BN
        total, lost = tl.zeros([BM, BN], ACC), tl.zeros([BM, BN], ACC)
        for k in range(0, tl.where(expert < E, K, 0), BK):
            if TMA:
                x = x_rows.load([m, k])
                if SWAPPED:
                    w = w_rows.load([expert * K + k, n])
                else:
                    w = w_rows.load([expert * N + n, k]).T
            else:
                x = _tile(x_ptr, m, k, end, K, x_stride, BM, BK, False)
                own = w_ptr + expert.to(tl.int64) * w_expert
                if SWAPPED:
                    w = _tile(own, k, n, K, N, w_stride, BK, BN, False)
                else:
                    w = _tile(own, n, k, N, K, w_stride, BN, BK, False).T
            total, lost = _add_product(x, w, total, lost, ACC)
        row, column = m + tl.arange(0, BM), n + tl.arange(0, BN)
        there = (row < end)[:, None] & (column < N)[None, :]
        tl.store(y_ptr + row.to(tl.int64)[:, None] * N + column[None, :], total, there)


@triton.jit(do_not_specialize=["T"])
def weights_kernel(
    dy_ptr, x_ptr, offsets_ptr, dw_ptr, T, E, N, K, dy_stride, x_stride, BN: tl.constexpr, BK: tl.constexpr,
    BR: tl.constexpr, TMA: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """dy [T, N], x [T, K], dw [E, N, K]."""
    if TMA:
        dy_rows = tl.make_tensor_descriptor(dy_ptr, [T, N], [dy_stride, 1], [BR, BN])
        x_rows = tl.make_tensor_descriptor(x_ptr, [T, K], [x_stride, 1], [BR, BK])
    else:
        dy_rows, x_rows = dy_ptr, x_ptr
    down, across = tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in range(tl.program_id(0), E * down * across, tl.num_programs(0)):
        expert, within = tile // (down * across), tile % (down * across)
        n, k = within % down * BN, within // down * BK
        begin, end = _rows_of(offsets_ptr, expert, T, E)
        whole = end - (end - begin) % BR  # rows before it are in full tiles
        total, lost = tl.zeros([BN, BK], ACC), tl.zeros([BN, BK], ACC)
        for t in range(begin, whole, BR):
            dy = _tile(dy_rows, t, n, end, N, dy_stride, BR, BN, TMA)
            x = _tile(x_rows, t, k, end, K, x_stride, BR, BK, TMA)
            total, lost = _add_product(dy.T, x, total, lost, ACC)
        if whole < end:
            dy = _tile(dy_ptr, whole, n, end, N, dy_stride, BR, BN, False)
            x = _tile(x_ptr, whole, k, end, K, x_stride, BR, BK, False)
            total, lost = _add_product(dy.T, x, total, lost, ACC)
        row, column = n + tl.arange(0, BN), k + tl.arange(0, BK)
        there = (row < N)[:, None] & (column < K)[None, :]
        at = (expert.to(tl.int64) * N + row)[:, None] * K + column[None, :]
        tl.store(dw_ptr + at, total, there)
