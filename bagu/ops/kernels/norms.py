"""RMSNorm, LayerNorm and ScaleNorm on Triton. They are memory-bound: x is read once and y is written once.

    rms      r = 1 / sqrt(mean(x^2) + eps)              y = x * r * w
    layer    r = 1 / sqrt(mean((x - mean)^2) + eps)     y = (x - mean) * r * w + b
    scale    r = 1 / max(sqrt(sum(x^2)), eps)           y = x * r * w, where w is one number

Forward saves r for the backward (layer: also the mean; scale: the norm instead of r). Backward, with h = (x - mean) * r
and g = dy * w:

    rms      dx = r * (g - h * mean(g * h))                  dw = sum_m dy * h
    layer    dx = r * (g - mean(g) - h * mean(g * h))        dw = sum_m dy * h        db = sum_m dy
    scale    dx = r * (g - h * sum(g * h))                   dw = sum_mn dy * h       (norm < eps: dx = r * g)

LayerNorm computes the mean first and the squared deviations second, both from registers, so a large mean does not make
the variance less accurate. The backward has few programs with many rows each: w, dw and db stay in registers, and the
kernel prefetches two rows ahead into shared memory (num_stages), which keeps loads in flight while a row is reduced.
(Unaligned rows cannot be prefetched this way.) `column_sum` then sums dw and db over programs, without atomics.
wide_norms handles rows that do not fit in registers.

`add_rms_norm` is rms with an addend: s = x + addend is rounded, stored and normalised, and backward adds ds to dx.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.contract.signature import accumulator
from bagu.ops.kernels.column_sum import column_sum, column_sums
from bagu.ops.kernels.early import start
from bagu.ops.kernels.launch import aligned, as_rows, next_power_of_2, num_sms, split_row, starts_early, triton_acc
from bagu.ops.kernels.rows import add, columns, load_row, masks, multiply, row_ids, store_row, sum_row
from bagu.ops.kernels.scalars import int64, reciprocal, rsqrt
from bagu.ops.kernels.wide_norms import wide_backward, wide_forward, wide_scale_backward

MAX_FORWARD = {"rms": 32768, "layer": 16384, "scale": 32768}  # columns: 64, 32, 64 values per thread at 16 warps
MAX_BACKWARD = 8192  # columns of fp32: w, dw, db, x and dy have 16 values per thread each; at 16,384 ptxas spills
MAX_BACKWARD_SCALE = 32768  # bytes: ScaleNorm has no w and dw, but two rows of x and of dy are in shared memory


@triton.jit
def _weights(ptr, n, N, KIND: tl.constexpr, FULL: tl.constexpr, ACC: tl.constexpr):
    """w or b as a row; ScaleNorm has a single number instead."""
    if KIND == "scale":
        g = tl.load(ptr).to(ACC)
        return (g, g)
    else:
        return [v.to(ACC) for v in load_row(ptr, 0, n, masks(0, n, 1, N, FULL), 0)]


@triton.jit
def _mean(total, N, share):
    """total / N within an ulp, from share = 1 / N: adds the remainder, exact by a fused multiply-add, times share.

    A correctly rounded division is slower (every row waits for it), and so is a second sum over the row.
    """
    mean = total * share
    return mean + tl.fma(-mean, tl.zeros_like(mean) + N, total) * share


@triton.jit
def _deviations(x, mean, n, N, FULL: tl.constexpr):
    """x - mean inside the row, 0 beyond its end."""
    if len(x) == 2:
        return (x[0] - mean, tl.where(n[1] < N, x[1] - mean, 0.0))
    elif FULL:
        return (x[0] - mean,)
    else:
        return (tl.where(n[0] < N, x[0] - mean, 0.0),)


@triton.jit
def _inverse(norm, eps):
    """1 / max(norm, eps); tl.maximum would drop a NaN."""
    return 1.0 / tl.where(norm < eps, eps, norm)


@triton.jit(do_not_specialize=["M"])
def _forward(
    x_ptr, addend_ptr, w_ptr, b_ptr, y_ptr, s_ptr, mean_ptr, kept_ptr, M, N, x_stride, addend_stride, eps, trips,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr, ACC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start(EARLY)
    n = columns(BLOCK_N, TAIL, ALIGNED)
    w = _weights(w_ptr, n, N, KIND, FULL, ACC)
    if b_ptr is not None:
        b = _weights(b_ptr, n, N, KIND, FULL, ACC)
    share = reciprocal(N, ACC)
    for i in tl.range(0, trips, num_stages=3 if ALIGNED else 1):
        m = row_ids(int64(i) * tl.num_programs(0) + tl.program_id(0), BLOCK_M)
        mask = masks(m, n, M, N, FULL)
        s = load_row(x_ptr, m, n, mask, x_stride)
        if addend_ptr is not None:
            addend = load_row(addend_ptr, m, n, mask, addend_stride)
            total = add([v.to(ACC) for v in s], [v.to(ACC) for v in addend])
            s = [v.to(x_ptr.dtype.element_ty) for v in total]
            store_row(s_ptr, m, n, mask, N, s)
        x = [v.to(ACC) for v in s]
        if KIND == "layer":
            mean = _mean(sum_row(x), N, share)
            x = _deviations(x, mean, n, N, FULL)
            tl.store(mean_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + mean, m < M)
        squares = sum_row(multiply(x, x))
        if KIND == "scale":
            kept = tl.sqrt(squares)
            r = _inverse(kept, eps)
        else:
            r = rsqrt(squares * share + eps)
            kept = r
        tl.store(kept_ptr + m, tl.zeros([BLOCK_M, 1], ACC) + kept, m < M)
        y = multiply([v * r for v in x], w)
        if b_ptr is not None:
            y = add(y, b)
        store_row(y_ptr, m, n, mask, N, y)


@triton.jit
def _zeros(n, BLOCK_M: tl.constexpr, KIND: tl.constexpr, ACC: tl.constexpr):
    """The initial accumulator for the gradient of `_weights`."""
    if KIND == "scale":
        return (tl.zeros([BLOCK_M, 1], ACC),)
    else:
        return [tl.zeros([BLOCK_M, v.shape[1]], ACC) for v in n]


@triton.jit(do_not_specialize=["M"])
def _backward(
    dy_ptr, ds_ptr, x_ptr, w_ptr, mean_ptr, kept_ptr, dx_ptr, dw_ptr, db_ptr,
    M, N, dy_stride, ds_stride, x_stride, eps, trips,
    KIND: tl.constexpr, ALIGNED: tl.constexpr, FULL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    n = columns(BLOCK_N, TAIL, ALIGNED)
    w = _weights(w_ptr, n, N, KIND, FULL, ACC)
    dw, db = _zeros(n, BLOCK_M, KIND, ACC), _zeros(n, BLOCK_M, KIND, ACC)
    for i in tl.range(0, trips, num_stages=3 if ALIGNED else 1):
        m = row_ids(int64(i) * tl.num_programs(0) + tl.program_id(0), BLOCK_M)
        mask = masks(m, n, M, N, FULL)
        dy = [v.to(ACC) for v in load_row(dy_ptr, m, n, mask, dy_stride)]
        x = [v.to(ACC) for v in load_row(x_ptr, m, n, mask, x_stride)]
        r = tl.load(kept_ptr + m, m < M, 1.0)
        level = 0.0
        g = multiply(dy, w)
        if KIND == "scale":
            norm = r
            r = _inverse(norm, eps)
            h = [v * r for v in x]
            along = sum_row(multiply(dy, h))
            dw = add(dw, (along,))
            along = tl.where(norm < eps, 0.0, along * w[0])
        else:
            if KIND == "layer":
                mean = tl.load(mean_ptr + m, m < M, 0.0)
                x = [v - mean for v in x]
                level = sum_row(g) / N
                db = add(db, dy)
            h = [v * r for v in x]
            along = sum_row(multiply(g, h)) / N
            dw = add(dw, multiply(dy, h))
        for p in tl.static_range(len(n)):
            dx = r * (g[p] - level - h[p] * along)
            if ds_ptr is not None:
                dx += tl.load(ds_ptr + m * ds_stride + n[p], mask[p], 0.0).to(ACC)
            tl.store(dx_ptr + m * N + n[p], dx, mask[p])
    program = int64(tl.program_id(0))
    if KIND == "scale":
        tl.store(dw_ptr + program, tl.sum(dw[0]))
    else:
        exists = masks(0, n, 1, N, FULL)
        store_row(dw_ptr, program, n, exists, N, [tl.sum(v, axis=0)[None, :] for v in dw])
        if db_ptr is not None:
            store_row(db_ptr, program, n, exists, N, [tl.sum(v, axis=0)[None, :] for v in db])


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Launch parameters: rows and columns of a tile, warps, programs per multiprocessor (None: one program per tile).

    With one program per tile, w and b are read for each tile; with fewer programs, they stay in registers.
    """

    block_m: int
    block_n: int
    tail: int
    num_warps: int
    per_sm: int | None = None


def forward_tile(x: torch.Tensor, block_m: int | None, num_warps: int | None) -> Tile:
    """The tile of RMSNorm and ScaleNorm."""
    N = x.shape[-1]
    block_m = block_m or max(1, 2048 // next_power_of_2(N))
    block_n, tail = split_row(N) if block_m == 1 else (next_power_of_2(N), 0)
    tile, per_warp = block_m * block_n, 512 if block_m > 1 or block_n == N else 1024
    warps = num_warps or (16 if tile > 16384 else min(max(tile // per_warp, 1), 8))
    return Tile(block_m=block_m, block_n=block_n, tail=tail, num_warps=warps)


def run_forward(
    kind: str,
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    tile: Tile,
    *,
    b: torch.Tensor | None = None,
    addend: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """(y, s, mean, r or norm); s is None without an addend, mean is None except for "layer"."""
    rows, w, b = as_rows(x), w.contiguous(), None if b is None else b.contiguous()
    addends = None if addend is None else as_rows(addend)
    M, N = rows.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    s = None if addend is None else torch.empty_like(y)
    kept = torch.empty(x.shape[:-1], dtype=accumulator(x.dtype), device=x.device)
    mean = torch.empty_like(kept) if kind == "layer" else None
    if not x.numel():
        return y, s, mean, kept
    strides = rows.stride(0), 0 if addends is None else addends.stride(0)
    args = (rows, addends, w, b, y, s, mean, kept, M, N, *strides, eps)
    if MAX_FORWARD[kind] < N:
        wide_forward(args, rows, kind)
    else:
        tiles = triton.cdiv(M, tile.block_m)
        programs = min(tiles, tile.per_sm * num_sms(x.device)) if tile.per_sm else tiles
        early = starts_early(x.device, rows=M)
        _forward[(programs,)](
            *args, triton.cdiv(tiles, programs), **_options(kind, tile, rows), EARLY=early, launch_pdl=early
        )
    return y, s, mean, kept


def _options(kind: str, tile: Tile, *rows: torch.Tensor) -> dict[str, Any]:
    return {
        "KIND": kind,
        "ALIGNED": aligned(*rows),
        "FULL": tile.block_n <= rows[0].shape[1],
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "TAIL": tile.tail,
        "ACC": triton_acc(rows[0].dtype),
        "num_warps": tile.num_warps,
    }


def _backward_tile(kind: str, N: int, num_warps: int | None) -> Tile:
    block_m = max(1, 2048 // next_power_of_2(N))
    block_n, tail = split_row(N) if block_m == 1 else (next_power_of_2(N), 0)
    warps = num_warps or min(max(block_m * block_n // (256 if block_m > 1 and kind != "scale" else 512), 1), 16)
    per_sm = max(16 // warps, 1)  # as many as fit at 128 registers per thread
    return Tile(block_m=block_m, block_n=block_n, tail=tail, num_warps=warps, per_sm=per_sm)


def run_backward(
    kind: str, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, kept: torch.Tensor, eps: float,
    programs_per_sm: int | None, num_warps: int | None,
    *, mean: torch.Tensor | None = None, b: torch.Tensor | None = None, ds: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """(dx, dw, db); db is None without b. dx is the norm's gradient plus ds."""
    dys, rows, w, more = as_rows(dy), as_rows(x), w.contiguous(), None if ds is None else as_rows(ds)
    (M, N), scale, outputs = rows.shape, kind == "scale", 1 if b is None else 2
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, torch.zeros_like(w), None if b is None else torch.zeros_like(b)
    tile = _backward_tile(kind, N, num_warps)
    if scale and tile.block_n * x.element_size() > MAX_BACKWARD_SCALE:
        return dx, wide_scale_backward(dys, rows, w, kept, dx, eps), None
    if not scale and tile.block_n * max(x.element_size() // 4, 1) > MAX_BACKWARD:
        partial = wide_backward(dys, more, rows, w, mean, kept, dx, outputs)
    else:
        tiles = triton.cdiv(M, tile.block_m)
        programs = min(num_sms(x.device) * (programs_per_sm or tile.per_sm or 1), tiles)
        strides = dys.stride(0), 0 if more is None else more.stride(0), rows.stride(0)
        partial = torch.empty(outputs, programs, 1 if scale else N, dtype=kept.dtype, device=x.device)
        _backward[(programs,)](
            dys, more, rows, w, mean, kept, dx, partial[0], partial[1] if outputs == 2 else None,
            M, N, *strides, eps, triton.cdiv(tiles, programs), **_options(kind, tile, dys, rows), maxnreg=128,
            # LayerNorm at N = 1 has dx = 0; a fused dy * w - mean would not cancel the rounding of the mean
            enable_fp_fusion=kind != "layer" or tile.tail > 0,
        )  # fmt: skip
    if b is None:
        return dx, column_sum(partial[0], w.dtype), None
    return dx, *column_sums(partial, w.dtype, b.dtype)
