"""BatchNorm on Triton: tensors as [O, K, I], statistics along K, 3-d tiles. group_norm shares the kernels.

For x[B, C, *S] the tensor is [B, C, S]: a tile is long along the contiguous dim, which is S, or C if there is no S.
Bandwidth is the limit. A channel's statistics must be known before its first output, so x is read twice. All programs
traverse memory in the same order, forwards for the sums and backwards for the outputs, so the second pass starts with
the data that is still in the L2 (60 MB on an H200, a whole (32, 64, 112, 112) in bf16).

If there are few channels, each is split over many programs. Each program sums x - pivot and its square, where pivot is
the mean of its first tile. If that tile is a fraction f of the program's values, (mean - pivot)^2 <= var * (1 - f) / f,
so the subtraction m2 = sum d^2 - (sum d)^2 / n loses at most a factor 1 / f, however far the mean is from zero. The
partial results (n, mean, m2) are combined by m2 = sum_p m2_p + n_p * (mean_p - mean)^2. Backward, with g = dy * w:

    db = sum dy        dw = sum dy * xhat        dx = r * (g - mean(g) - xhat * mean(g * xhat))        (training)

With a ReLU, dy is 0 where y is: its sign is computed again from x, which both passes read anyway.

There are no atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.batch_norm.tiling import Tiling, as_channels
from bagu.ops.kernels.column_sum import column_sum, column_sums
from bagu.ops.kernels.scalars import int64
from bagu.ops.launch import next_power_of_2, triton_acc
from bagu.ops.signature import accumulator

Affine = tuple[torch.Tensor | None, torch.Tensor | None]  # weight and bias
TUNABLE = {  # the tests run every combination
    "forward": {"elements": (1024, 4096), "num_warps": (4, 8)},
    "backward": {"elements": (1024, 4096), "num_warps": (4, 8)},
}


@triton.jit
def _count(t, O, I, i_tiles, BO: tl.constexpr, BI: tl.constexpr):
    """Number of values of one channel in tile t."""
    return min(O - t // i_tiles * BO, BO) * min(I - t % i_tiles * BI, BI)


@triton.jit
def _at(t, k, O, K, I, i_tiles, o_stride, k_stride, BO: tl.constexpr, BI: tl.constexpr):
    """Offsets and mask, [BO, BK, BI], of tile t for the channels k."""
    o = int64(t // i_tiles) * BO + tl.arange(0, BO)
    i = int64(t % i_tiles) * BI + tl.arange(0, BI)
    real = (o < O)[:, None, None] & (k < K)[None, :, None] & (i < I)[None, None, :]
    return o[:, None, None] * o_stride + k[None, :, None] * k_stride + i[None, None, :], real


@triton.jit
def _statistics(
    x_ptr, n_ptr, mean_ptr, m2_ptr, O, K, I, i_tiles, tiles, o_stride, k_stride,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    p, splits = tl.program_id(1), tl.num_programs(1)
    k = int64(tl.program_id(0)) * BK + tl.arange(0, BK)
    at, real = _at(p, k, O, K, I, i_tiles, o_stride, k_stride, BO, BI)
    x = tl.load(x_ptr + at, real, 0.0).to(ACC)
    n = _count(p, O, I, i_tiles, BO, BI)
    pivot = tl.sum(tl.sum(x, axis=2), axis=0) / n
    pivot = pivot.to(x_ptr.dtype.element_ty).to(ACC)  # makes x - pivot exact for a 16-bit x
    pivot = tl.where(pivot - pivot == 0.0, pivot, 0.0)  # an infinite pivot would turn an infinite mean into NaN
    d = tl.where(real, x - pivot[None, :, None], 0.0)
    sums, squares = d, d * d
    for t in range(p + splits, tiles, splits):
        at, real = _at(t, k, O, K, I, i_tiles, o_stride, k_stride, BO, BI)
        x = tl.load(x_ptr + at, real, 0.0).to(ACC)
        d = tl.where(real, x - pivot[None, :, None], 0.0)
        sums += d
        squares += d * d
        n += _count(t, O, I, i_tiles, BO, BI)
    total = tl.sum(tl.sum(sums, axis=2), axis=0)
    m2 = tl.sum(tl.sum(squares, axis=2), axis=0) - total * total / n
    tl.store(n_ptr + p, n, tl.program_id(0) == 0)
    tl.store(mean_ptr + int64(p) * K + k, pivot + total / n, k < K)
    tl.store(m2_ptr + int64(p) * K + k, tl.where(m2 < 0.0, 0.0, m2), k < K)


@triton.jit
def _combine(
    n_ptr, mean_ptr, m2_ptr, mean_out_ptr, r_ptr, running_mean_ptr, running_var_ptr, new_mean_ptr, new_var_ptr,
    K, splits, momentum, eps, BP: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    p = tl.arange(0, BP)
    at = p.to(tl.int64)[:, None] * K + k[None, :]
    real = (p < splits)[:, None] & (k < K)[None, :]
    n = tl.load(n_ptr + p, p < splits, 0).to(ACC)[:, None]
    total = tl.sum(n, axis=0)
    means = tl.load(mean_ptr + at, real, 0.0)
    mean = tl.sum(n * means, axis=0) / total
    off = means - mean[None, :]
    m2 = tl.sum(tl.load(m2_ptr + at, real, 0.0) + n * off * off, axis=0)
    tl.store(mean_out_ptr + k, mean, k < K)
    tl.store(r_ptr + k, 1.0 / tl.sqrt(m2 / total + eps), k < K)
    if new_mean_ptr is not None:
        var = m2 / (total - 1)
        if running_mean_ptr is not None:
            old_mean = tl.load(running_mean_ptr + k, k < K, 0.0).to(ACC)
            old_var = tl.load(running_var_ptr + k, k < K, 0.0).to(ACC)
            mean = old_mean * (1.0 - momentum) + mean * momentum
            var = old_var * (1.0 - momentum) + var * momentum
        tl.store(new_mean_ptr + k, mean, k < K)
        tl.store(new_var_ptr + k, var, k < K)


@triton.jit
def _tile(pid, K, I, BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr):
    """The tile (o, k, i) of a program that writes outputs. The last program gets the first tile."""
    t = tl.num_programs(0) - 1 - pid
    i_tiles, k_tiles = tl.cdiv(I, BI), tl.cdiv(K, BK)
    o = int64(t // i_tiles // k_tiles) * BO + tl.arange(0, BO)
    k = int64(t // i_tiles % k_tiles) * BK + tl.arange(0, BK)
    return o[:, None, None], k[None, :, None], (int64(t % i_tiles) * BI + tl.arange(0, BI))[None, None, :]


@triton.jit
def _affine(xhat, w_ptr, b_ptr, k, K, ACC: tl.constexpr):
    """xhat * w + b; k has the channels of xhat."""
    y = xhat
    if w_ptr is not None:
        y *= tl.load(w_ptr + k, k < K, 0.0).to(ACC)
    if b_ptr is not None:
        y += tl.load(b_ptr + k, k < K, 0.0).to(ACC)
    return y


@triton.jit
def _normalize(
    x_ptr, mean_ptr, r_ptr, w_ptr, b_ptr, y_ptr, O, K, I, x_o_stride, x_k_stride, groups, D,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    o, k, i = _tile(tl.program_id(0), K, I, BO, BK, BI)
    segment = (o < O) & (k < K)
    real = segment & (i < I)
    s = o * groups + k // D  # index of the statistics
    x = tl.load(x_ptr + o * x_o_stride + k * x_k_stride + i, real, 0.0, eviction_policy="evict_first").to(ACC)
    xhat = (x - tl.load(mean_ptr + s, segment, 0.0)) * tl.load(r_ptr + s, segment, 0.0)
    y = _affine(xhat, w_ptr, b_ptr, k, K, ACC)
    if RELU:
        y = tl.where(y <= 0.0, 0.0, y)  # keeps a NaN
    tl.store(y_ptr + (o * K + k) * I + i, y, real, eviction_policy="evict_first")


@triton.jit
def _infer(
    x_ptr, running_mean_ptr, running_var_ptr, w_ptr, b_ptr, y_ptr, new_mean_ptr, new_var_ptr, mean_ptr, r_ptr, O, K, I,
    x_o_stride, x_k_stride, eps,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Inference in one launch: the programs with the first tile of a channel also write its statistics."""
    o, k, i = _tile(tl.program_id(0), K, I, BO, BK, BI)
    real = (o < O) & (k < K) & (i < I)
    mean = tl.load(running_mean_ptr + k, k < K, 0.0).to(ACC)
    var = tl.load(running_var_ptr + k, k < K, 0.0).to(ACC)
    r = 1.0 / tl.sqrt(var + eps)
    x = tl.load(x_ptr + o * x_o_stride + k * x_k_stride + i, real, 0.0, eviction_policy="evict_first").to(ACC)
    y = _affine((x - mean) * r, w_ptr, b_ptr, k, K, ACC)
    if RELU:
        y = tl.where(y <= 0.0, 0.0, y)
    tl.store(y_ptr + (o * K + k) * I + i, y, real, eviction_policy="evict_first")
    first = (k < K) & (tl.min(o) == 0) & (tl.min(i) == 0)
    tl.store(new_mean_ptr + k, mean, first)
    tl.store(new_var_ptr + k, var, first)
    tl.store(mean_ptr + k, mean, first)
    tl.store(r_ptr + k, r, first)


@triton.jit
def _sums(
    dy_ptr, x_ptr, mean_ptr, r_ptr, w_ptr, b_ptr, part_ptr, O, K, I, i_tiles, tiles,
    dy_o_stride, dy_k_stride, x_o_stride, x_k_stride, C, D,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(1)
    k = int64(tl.program_id(0)) * BK + tl.arange(0, BK)
    mean = tl.load(mean_ptr + k // D, k < K, 0.0)[None, :, None]
    r = tl.load(r_ptr + k // D, k < K, 0.0)
    if RELU:
        slope, shift = r, tl.zeros([BK], ACC)  # y = (x - mean) * slope + shift
        if w_ptr is not None:
            slope *= tl.load(w_ptr + k, k < K, 0.0).to(ACC)
        if b_ptr is not None:
            shift = tl.load(b_ptr + k, k < K, 0.0).to(ACC)
    db = tl.zeros([BO, BK, BI], ACC)
    dw = tl.zeros([BO, BK, BI], ACC)
    for t in range(p, tiles, tl.num_programs(1)):
        at, real = _at(t, k, O, K, I, i_tiles, dy_o_stride, dy_k_stride, BO, BI)
        dy = tl.load(dy_ptr + at, real, 0.0).to(ACC)
        at, real = _at(t, k, O, K, I, i_tiles, x_o_stride, x_k_stride, BO, BI)
        x = tl.load(x_ptr + at, real, 0.0).to(ACC)
        if RELU:
            dy = tl.where((x - mean) * slope[None, :, None] + shift[None, :, None] <= 0.0, 0.0, dy)
        db += dy
        dw += dy * (x - mean)
    part = part_ptr + int64(p) * 2 * K + k // C * 2 * C + k % C
    tl.store(part, tl.sum(tl.sum(db, axis=2), axis=0), k < K)
    tl.store(part + C, tl.sum(tl.sum(dw, axis=2), axis=0) * r, k < K)


@triton.jit
def _along(
    part_ptr, w_ptr, along_ptr, statistics, splits, stride, C, groups, D, n,
    BS: tl.constexpr, BQ: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """The means of g and of g * xhat for each statistic, over all parts of its D channels."""
    s = tl.program_id(0) * BS + tl.arange(0, BS)
    g, gx = tl.zeros([BS, BQ], ACC), tl.zeros([BS, BQ], ACC)
    for start in range(0, splits * D, BQ):
        q = start + tl.arange(0, BQ)
        c = (s % groups * D)[:, None] + (q % D)[None, :]
        real = (s < statistics)[:, None] & (q < splits * D)[None, :]
        part = part_ptr + (q // D).to(tl.int64)[None, :] * stride + (s // groups).to(tl.int64)[:, None] * 2 * C + c
        db, dw = tl.load(part, real, 0.0), tl.load(part + C, real, 0.0)
        if w_ptr is not None:
            w = tl.load(w_ptr + c, real, 0.0).to(ACC)
            db, dw = db * w, dw * w
        g += db
        gx += dw
    tl.store(along_ptr + s, tl.sum(g, axis=1) / n, s < statistics)
    tl.store(along_ptr + statistics + s, tl.sum(gx, axis=1) / n, s < statistics)


@triton.jit
def _pull(
    dy_ptr, x_ptr, mean_ptr, r_ptr, w_ptr, b_ptr, along_ptr, dx_ptr, O, K, I,
    dy_o_stride, dy_k_stride, x_o_stride, x_k_stride, groups, D, statistics,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    o, k, i = _tile(tl.program_id(0), K, I, BO, BK, BI)
    segment = (o < O) & (k < K)
    real = segment & (i < I)
    s = o * groups + k // D
    dx = tl.load(dy_ptr + o * dy_o_stride + k * dy_k_stride + i, real, 0.0, eviction_policy="evict_first").to(ACC)
    r = tl.load(r_ptr + s, segment, 0.0)
    if RELU or along_ptr is not None:  # in inference the statistics are constants
        x = tl.load(x_ptr + o * x_o_stride + k * x_k_stride + i, real, 0.0, eviction_policy="evict_first").to(ACC)
        xhat = (x - tl.load(mean_ptr + s, segment, 0.0)) * r
        if RELU:
            dx = tl.where(_affine(xhat, w_ptr, b_ptr, k, K, ACC) <= 0.0, 0.0, dx)
    if w_ptr is not None:
        dx *= tl.load(w_ptr + k, k < K, 0.0).to(ACC)
    if along_ptr is not None:
        dx -= tl.load(along_ptr + s, segment, 0.0) + xhat * tl.load(along_ptr + statistics + s, segment, 0.0)
    tl.store(dx_ptr + (o * K + k) * I + i, dx * r, real, eviction_policy="evict_first")


def statistics(
    x: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
    eps: float,
    *,
    tiling: Tiling,
    running: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    new: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    momentum: float = 0.0,
) -> None:
    """Write mean[K] and r[K] of x[O, K, I], and the new running statistics if `new` is given."""
    (O, K, I), t, acc = x.shape, tiling, triton_acc(x.dtype)
    n = torch.empty(t.splits, dtype=torch.int64, device=x.device)
    parts = torch.empty(2, t.splits, K, dtype=mean.dtype, device=x.device)
    _statistics[(t.k_tiles, t.splits)](
        x, n, parts[0], parts[1], O, K, I, t.i_tiles, t.tiles, x.stride(0), x.stride(1), ACC=acc, **t.blocks
    )
    block = max(1024 // next_power_of_2(t.splits), 8)
    _combine[(triton.cdiv(K, block),)](
        n, parts[0], parts[1], mean, r, *running, *new, K, t.splits, momentum, eps,
        BP=next_power_of_2(t.splits), BK=block, ACC=acc, num_warps=4,
    )  # fmt: skip


def normalize(
    x: torch.Tensor, mean: torch.Tensor, r: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None,
    y: torch.Tensor, *, tiling: Tiling, groups: int = 0, D: int = 1, relu: bool = False,
) -> None:  # fmt: skip
    """Write y, contiguous, from x[O, K, I]; channel k of row o uses the statistics o * groups + k // D."""
    _normalize[tiling.grid](
        x, mean, r, w, b, y, *x.shape, x.stride(0), x.stride(1), groups, D,
        ACC=triton_acc(x.dtype), RELU=relu, **tiling.blocks,
    )  # fmt: skip


def channel_sums(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, r: torch.Tensor, *, tiling: Tiling, C: int, D: int = 1,
    relu: Affine | None = None,
) -> torch.Tensor:  # fmt: skip
    """Partial sums of db and dw, [splits, K / C, 2, C], for [O, K, I]; channel k uses the statistics k // D.

    With the weight and bias in `relu`, dy is that of a ReLU of the result, and K is C."""
    (O, K, I), t = x.shape, tiling
    part = torch.empty(t.splits, K // C, 2, C, dtype=r.dtype, device=x.device)
    _sums[(t.k_tiles, t.splits)](
        dy, x, mean, r, *(relu or (None, None)), part, O, K, I, t.i_tiles, t.tiles,
        dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), C, D,
        ACC=triton_acc(x.dtype), RELU=relu is not None, **t.blocks,
    )  # fmt: skip
    return part


def pull(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, r: torch.Tensor, w: torch.Tensor | None,
    part: torch.Tensor | None, dx: torch.Tensor, *, tiling: Tiling, groups: int = 0, D: int = 1,
    relu: Affine | None = None,
) -> None:  # fmt: skip
    """Write dx, contiguous, for x[O, K, I]; `part` holds the partial sums of db and dw, or is None in inference."""
    (O, K, I), acc, along = x.shape, triton_acc(x.dtype), None
    if part is not None:
        along = torch.empty(2, r.numel(), dtype=r.dtype, device=x.device)
        block = min(next_power_of_2(len(part) * D), 128)
        _along[(triton.cdiv(r.numel(), 1024 // block),)](
            part, w, along, r.numel(), len(part), part.stride(0), K, groups or K, D, D * I if groups else O * I,
            BS=1024 // block, BQ=block, ACC=acc, num_warps=4,
        )  # fmt: skip
    _pull[tiling.grid](
        dy, x, mean, r, w, None if relu is None else relu[1], along, dx, O, K, I,
        dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), groups, D, r.numel(),
        ACC=acc, RELU=relu is not None, **tiling.blocks,
    )  # fmt: skip


def weight_gradients(
    part: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dw and db, from the partial sums [P, 2, C] of db and dw that the programs wrote."""
    if w is None or b is None:
        own = [None if v is None else column_sum(part[:, i], v.dtype) for i, v in ((1, w), (0, b))]
        return own[0], own[1]
    db, dw = column_sums(part.transpose(0, 1), b.dtype, w.dtype)
    return dw, db


def forward(
    x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None, training: bool, momentum: float, eps: float, relu: bool,
    *, elements: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    C, acc = x.shape[1], accumulator(x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, r, new_mean, new_var = (torch.empty(C, dtype=acc, device=x.device) for _ in range(4))
    if not x.numel():
        return y, *_of_nothing(running_mean, running_var, eps, new_mean, new_var, mean, r)
    flat = as_channels(x)
    w, b, *old = (None if v is None else v.contiguous() for v in (w, b, running_mean, running_var))
    t = Tiling.of(flat, elements, num_warps)
    if training:
        statistics(flat, mean, r, eps, tiling=t, running=(old[0], old[1]), new=(new_mean, new_var), momentum=momentum)
        normalize(flat, mean, r, w, b, y, tiling=t, relu=relu)
    else:
        _infer[t.grid](
            flat, *old, w, b, y, new_mean, new_var, mean, r, *flat.shape, flat.stride(0), flat.stride(1), eps,
            ACC=triton_acc(x.dtype), RELU=relu, **t.blocks,
        )  # fmt: skip
    return y, new_mean, new_var, mean, r


def _of_nothing(
    running_mean: torch.Tensor | None, running_var: torch.Tensor | None, eps: float, *made: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """new_mean, new_var, mean and r of an empty batch."""
    if running_mean is None or running_var is None:
        values = [torch.full_like(m, torch.nan) for m in made]
    else:
        r = torch.rsqrt(running_var.to(made[0].dtype) + eps)
        values = [m.copy_(v) for m, v in zip(made, (running_mean, running_var, running_mean, r), strict=True)]
    return values[0], values[1], values[2], values[3]


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None, mean: torch.Tensor,
    r: torch.Tensor, training: bool, momentum: float, eps: float, relu: bool,
    *, elements: int | None = None, num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, None if w is None else torch.zeros_like(w), None if b is None else torch.zeros_like(b)
    C, flat, dys = x.shape[1], as_channels(x), as_channels(dy)
    scale, shift = (None if v is None else v.contiguous() for v in (w, b))
    t, affine = Tiling.of(flat, elements, num_warps), (scale, shift) if relu else None
    part = channel_sums(dys, flat, mean, r, tiling=t, C=C, relu=affine)
    pull(dys, flat, mean, r, scale, part if training else None, dx, tiling=t, relu=affine)
    return dx, *weight_gradients(part.view(-1, 2, C), w, b)
