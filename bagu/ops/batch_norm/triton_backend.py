"""BatchNorm on Triton: tensors as [O, K, I], statistics along K, 3-d tiles. group_norm shares the kernels.

For x[B, C, *S] the tensor is [B, C, S], and [B * S, C, 1] if channels are last in memory: a tile is long along the
contiguous dim. Bandwidth is the limit. A channel's statistics must be known before its first output, so x is read
twice, by two kernels with the same programs: a program has BK channels and shares their tiles with `splits` others. The
first kernel traverses a program's tiles forwards and writes partial sums; the second adds up those of its channels, and
traverses the tiles backwards, so that it starts with the data that is still in the L2 (60 MB on an H200, a whole
(32, 64, 112, 112) in bf16).

A program sums x - pivot and its square, where pivot is the mean of its first tile. If that tile is a fraction f of the
program's values, (mean - pivot)^2 <= var * (1 - f) / f, so the subtraction m2 = sum d^2 - (sum d)^2 / n loses at most a
factor 1 / f, however far the mean is from zero. The partial results (n, mean, m2) are combined by
m2 = sum_p m2_p + n_p * (mean_p - mean)^2. Backward, with g = dy * w:

    db = sum dy        dw = sum dy * xhat        dx = r * (g - mean(g) - xhat * mean(g * xhat))        (training)

With a ReLU, dy is 0 where y is: y = (x - mean) * (r * w) + b is computed again from x, which both passes read anyway.

Statistics, weights and their gradients are written by the first of the programs that share a channel. There are no
atomics, so the same inputs give the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.batch_norm.spec import Args
from bagu.ops.batch_norm.tiling import Tiling, as_channels
from bagu.ops.contract.signature import accumulator
from bagu.ops.kernels.launch import channels_last, empty_like, triton_acc
from bagu.ops.kernels.scalars import int64

Pair = tuple[torch.Tensor | None, torch.Tensor | None]
TUNABLE = {  # the tests run every combination
    "forward": {"elements": (1024, 4096), "num_warps": (4, 8)},
    "backward": {"elements": (1024, 4096), "num_warps": (4, 8)},
}


@triton.jit
def _channels(BK: tl.constexpr):
    """The channels of this program."""
    return int64(tl.program_id(0)) * BK + tl.arange(0, BK)


@triton.jit
def _at(t, k, O, K, I, i_tiles, o_stride, k_stride, BO: tl.constexpr, BI: tl.constexpr):
    """Offsets and mask, [BO, BK, BI], of tile t for the channels k."""
    o = int64(t // i_tiles) * BO + tl.arange(0, BO)
    i = int64(t % i_tiles) * BI + tl.arange(0, BI)
    real = (o < O)[:, None, None] & (k < K)[None, :, None] & (i < I)[None, None, :]
    return o[:, None, None] * o_stride + k[None, :, None] * k_stride + i[None, None, :], real


@triton.jit
def _sum(x):
    """The sum of a tile for each channel."""
    return tl.sum(tl.sum(x, axis=2), axis=0)


@triton.jit
def _load(ptr, k, K, otherwise, ACC: tl.constexpr):
    """The values of a vector for the channels k, [1, BK, 1]; `otherwise` if there is no vector."""
    if ptr is None:
        return tl.full([1, k.shape[0], 1], otherwise, ACC)
    else:
        return tl.load(ptr + k, k < K, 0.0).to(ACC)[None, :, None]


@triton.jit
def _statistics(
    x_ptr, part_ptr, O, K, I, i_tiles, tiles, o_stride, k_stride,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The mean and m2 of a program's values, as part[p, 0, K] and part[p, 1, K], and, after all parts, their number."""
    p, splits, k = tl.program_id(1), tl.num_programs(1), _channels(BK)
    at, real = _at(p, k, O, K, I, i_tiles, o_stride, k_stride, BO, BI)
    x = tl.load(x_ptr + at, real, 0.0).to(ACC)
    n = min(O - p // i_tiles * BO, BO) * min(I - p % i_tiles * BI, BI)
    pivot = _sum(x) / n
    pivot = pivot.to(x_ptr.dtype.element_ty).to(ACC)  # makes x - pivot exact for a 16-bit x
    pivot = tl.where(pivot - pivot == 0.0, pivot, 0.0)  # an infinite pivot would turn an infinite mean into NaN
    d = tl.where(real, x - pivot[None, :, None], 0.0)
    sums, squares = d, d * d
    for t in tl.range(p + splits, tiles, splits, num_stages=STAGES):
        at, real = _at(t, k, O, K, I, i_tiles, o_stride, k_stride, BO, BI)
        x = tl.load(x_ptr + at, real, 0.0).to(ACC)
        d = tl.where(real, x - pivot[None, :, None], 0.0)
        sums += d
        squares += d * d
        n += min(O - t // i_tiles * BO, BO) * min(I - t % i_tiles * BI, BI)
    total = _sum(sums)
    m2 = _sum(squares) - total * total / n
    part = part_ptr + int64(p) * 2 * K + k
    tl.store(part, pivot + total / n, k < K)
    tl.store(part + K, tl.where(m2 < 0.0, 0.0, m2), k < K)
    tl.store(part_ptr + int64(splits) * 2 * K + p, n, tl.program_id(0) == 0)


@triton.jit
def _parts(part_ptr, start, s, S, parts, BP: tl.constexpr):
    """n, mean and m2 of the statistics s, of S, in BP parts."""
    p = start + tl.arange(0, BP)[:, None]
    part, real = part_ptr + p.to(tl.int64) * 2 * S + s[None, :], (p < parts) & (s < S)[None, :]
    n = tl.load(part_ptr + int64(parts) * 2 * S + p, p < parts, 0.0)
    return n, tl.load(part, real, 0.0), tl.load(part + S, real, 0.0)


@triton.jit
def _combined(part_ptr, s, S, parts, BP: tl.constexpr, BK: tl.constexpr, ACC: tl.constexpr):
    """n, mean and m2 of the statistics s, of S, over all parts."""
    count, mean, m2 = tl.zeros([BP, 1], ACC), tl.zeros([BP, BK], ACC), tl.zeros([BP, BK], ACC)
    for start in range(0, parts, BP):
        n, means, _ = _parts(part_ptr, start, s, S, parts, BP)
        count += n
        mean += n * means
    count = tl.sum(count, axis=0)
    mean = tl.sum(mean, axis=0) / count
    for start in range(0, parts, BP):
        n, means, spread = _parts(part_ptr, start, s, S, parts, BP)
        off = means - mean[None, :]
        m2 += spread + n * off * off
    return count, mean, tl.sum(m2, axis=0)


@triton.jit
def _normalize(
    x_ptr, part_ptr, old_mean_ptr, old_var_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, r_ptr, new_mean_ptr, new_var_ptr,
    O, K, I, i_tiles, tiles, o_stride, k_stride, C, D, parts, momentum, eps,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr, RELU: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y, from the statistics k // D of channel k: combined from their parts, or, if there are none, the old ones."""
    p, splits, k = tl.program_id(1), tl.num_programs(1), _channels(BK)
    first = (k < K) & (k % D == 0) & (p == 0)
    if part_ptr is None:
        mean = tl.load(old_mean_ptr + k, k < K, 0.0).to(ACC)
        var = tl.load(old_var_ptr + k, k < K, 0.0).to(ACC)
        new_mean, new_var = mean, var
    else:
        n, mean, m2 = _combined(part_ptr, k // D, K // D, parts, BP, BK, ACC)
        var = m2 / n
        new_mean, new_var = mean, m2 / (n - 1)
        if old_mean_ptr is not None:
            old_mean = tl.load(old_mean_ptr + k, k < K, 0.0).to(ACC)
            old_var = tl.load(old_var_ptr + k, k < K, 0.0).to(ACC)
            new_mean = old_mean * (1.0 - momentum) + mean * momentum
            new_var = old_var * (1.0 - momentum) + new_var * momentum
    r = 1.0 / tl.sqrt(var + eps)
    tl.store(mean_ptr + k // D, mean, first)
    tl.store(r_ptr + k // D, r, first)
    if new_mean_ptr is not None:
        tl.store(new_mean_ptr + k, new_mean, first)
        tl.store(new_var_ptr + k, new_var, first)
    slope, b = r[None, :, None] * _load(w_ptr, k % C, C, 1.0, ACC), _load(b_ptr, k % C, C, 0.0, ACC)
    for j in tl.range(p, tiles, splits, num_stages=STAGES):
        t = tiles - 1 - j
        at, real = _at(t, k, O, K, I, i_tiles, o_stride, k_stride, BO, BI)
        x = tl.load(x_ptr + at, real, 0.0, eviction_policy="evict_first").to(ACC)
        y = (x - mean[None, :, None]) * slope + b
        if RELU:
            y = tl.where(y <= 0.0, 0.0, y)  # keeps a NaN
        at, real = _at(t, k, O, K, I, i_tiles, int64(K) * I, I, BO, BI)
        tl.store(y_ptr + at, y, real, eviction_policy="evict_first")


@triton.jit
def _sums(
    dy_ptr, x_ptr, mean_ptr, r_ptr, w_ptr, b_ptr, part_ptr, O, K, I, i_tiles, tiles,
    dy_o_stride, dy_k_stride, x_o_stride, x_k_stride, C, D,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr, RELU: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of dy, as part[p, k // C, 0, k % C], and of dy * xhat, as part[p, k // C, 1, k % C], of a program."""
    p, splits, k = tl.program_id(1), tl.num_programs(1), _channels(BK)
    mean = tl.load(mean_ptr + k // D, k < K, 0.0)[None, :, None]
    r = tl.load(r_ptr + k // D, k < K, 0.0)
    if RELU:
        slope = r[None, :, None] * _load(w_ptr, k, K, 1.0, ACC)
        b = _load(b_ptr, k, K, 0.0, ACC)
    db = tl.zeros([BO, BK, BI], ACC)
    dw = tl.zeros([BO, BK, BI], ACC)
    for t in tl.range(p, tiles, splits, num_stages=STAGES):
        at, real = _at(t, k, O, K, I, i_tiles, dy_o_stride, dy_k_stride, BO, BI)
        dy = tl.load(dy_ptr + at, real, 0.0).to(ACC)
        at, real = _at(t, k, O, K, I, i_tiles, x_o_stride, x_k_stride, BO, BI)
        off = tl.load(x_ptr + at, real, 0.0).to(ACC) - mean
        if RELU:
            dy = tl.where(off * slope + b <= 0.0, 0.0, dy)
        db += dy
        dw += dy * off
    part = part_ptr + int64(p) * 2 * K + k // C * 2 * C + k % C
    tl.store(part, _sum(db), k < K)
    tl.store(part + C, _sum(dw) * r, k < K)


@triton.jit
def _pull(
    dy_ptr, x_ptr, mean_ptr, r_ptr, w_ptr, b_ptr, part_ptr, dx_ptr, dw_ptr, db_ptr, O, K, I, i_tiles, tiles,
    dy_o_stride, dy_k_stride, x_o_stride, x_k_stride, C, D, parts, n,
    BO: tl.constexpr, BK: tl.constexpr, BI: tl.constexpr, BQ: tl.constexpr, ACC: tl.constexpr,
    RELU: tl.constexpr, TRAINING: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, from the sums that `_sums` wrote: those of the D channels that share the statistics of channel k, n values
    each. dw and db are those of D = 1."""
    p, splits, k = tl.program_id(1), tl.num_programs(1), _channels(BK)
    db, dw = tl.zeros([BQ, BK], ACC), tl.zeros([BQ, BK], ACC)
    g, gx = tl.zeros([BQ, BK], ACC), tl.zeros([BQ, BK], ACC)
    for start in range(0, parts * D, BQ):
        q = start + tl.arange(0, BQ)[:, None]
        c = (k // D * D)[None, :] + q % D
        real = (k < K)[None, :] & (q < parts * D)
        part = part_ptr + (q // D).to(tl.int64) * 2 * K + c // C * 2 * C + c % C
        ones, dots = tl.load(part, real, 0.0), tl.load(part + C, real, 0.0)
        db += ones
        dw += dots
        if w_ptr is not None:
            w = tl.load(w_ptr + c % C, real, 0.0).to(ACC)
            ones, dots = ones * w, dots * w
        g += ones
        gx += dots
    first = (k < K) & (p == 0)
    if db_ptr is not None:
        tl.store(db_ptr + k, tl.sum(db, axis=0), first)
    if dw_ptr is not None:
        tl.store(dw_ptr + k, tl.sum(dw, axis=0), first)
    mean_g, mean_gx = (tl.sum(g, axis=0) / n)[None, :, None], (tl.sum(gx, axis=0) / n)[None, :, None]
    mean, r = _load(mean_ptr, k // D, K // D, 0.0, ACC), _load(r_ptr, k // D, K // D, 0.0, ACC)
    w, b = _load(w_ptr, k % C, C, 1.0, ACC), _load(b_ptr, k % C, C, 0.0, ACC)
    slope = r * w
    for j in tl.range(p, tiles, splits, num_stages=STAGES):
        t = tiles - 1 - j
        at, real = _at(t, k, O, K, I, i_tiles, dy_o_stride, dy_k_stride, BO, BI)
        dx = tl.load(dy_ptr + at, real, 0.0, eviction_policy="evict_first").to(ACC)
        if RELU or TRAINING:  # in inference the statistics are constants
            at, real = _at(t, k, O, K, I, i_tiles, x_o_stride, x_k_stride, BO, BI)
            off = tl.load(x_ptr + at, real, 0.0, eviction_policy="evict_first").to(ACC) - mean
            if RELU:
                dx = tl.where(off * slope + b <= 0.0, 0.0, dx)
        dx *= w
        if TRAINING:
            dx -= mean_g + off * r * mean_gx
        at, real = _at(t, k, O, K, I, i_tiles, int64(K) * I, I, BO, BI)
        tl.store(dx_ptr + at, dx * r, real, eviction_policy="evict_first")


def statistics(x: torch.Tensor, *, tiling: Tiling) -> tuple[torch.Tensor, int]:
    """The partial statistics of x[O, K, I], for `normalize`, and how many parts there are of each."""
    t, K = tiling, x.shape[1]
    part = torch.empty(t.splits * (2 * K + 1), dtype=accumulator(x.dtype), device=x.device)
    _statistics[t.grid](
        x, part, *x.shape, t.i_tiles, t.tiles, x.stride(0), x.stride(1), ACC=triton_acc(x.dtype), **t.options
    )
    return part, t.splits


def normalize(
    x: torch.Tensor, part: torch.Tensor | None, parts: int, affine: Pair, y: torch.Tensor, mean: torch.Tensor,
    r: torch.Tensor, eps: float, *, tiling: Tiling, C: int, D: int = 1, old: Pair = (None, None),
    new: Pair = (None, None), momentum: float = 0.0, relu: bool = False,
) -> None:  # fmt: skip
    """Write y, contiguous, from x[O, K, I], and mean[K / D] and r[K / D]: channel k uses the statistics k // D, the
    weight and bias k % C, and writes the new running statistics, from the old ones, if `new` is given. Without `part`
    the old ones normalise."""
    t = tiling
    _normalize[t.grid](
        x, part, *old, *affine, y, mean, r, *new, *x.shape, t.i_tiles, t.tiles, x.stride(0), x.stride(1),
        C, D, parts, momentum, eps, BP=t.parts_at_once(parts), ACC=triton_acc(x.dtype), RELU=relu, **t.options,
    )  # fmt: skip


def channel_sums(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
    *,
    tiling: Tiling,
    C: int,
    D: int = 1,
    relu: Pair | None = None,
) -> torch.Tensor:
    """Partial sums of db and dw, [splits, K / C, 2, C], for [O, K, I]; channel k uses the statistics k // D.

    With the weight and bias in `relu`, dy is that of a ReLU of the result, and K is C."""
    K, t = x.shape[1], tiling
    part = torch.empty(t.splits, K // C, 2, C, dtype=r.dtype, device=x.device)
    _sums[t.grid](
        dy, x, mean, r, *(relu or (None, None)), part, *x.shape, t.i_tiles, t.tiles,
        dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), C, D,
        ACC=triton_acc(x.dtype), RELU=relu is not None, **t.options,
    )  # fmt: skip
    return part


def pull(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, r: torch.Tensor, affine: Pair, part: torch.Tensor,
    dx: torch.Tensor, grads: Pair = (None, None), *, tiling: Tiling, D: int = 1, relu: bool = False,
    training: bool = True,
) -> None:  # fmt: skip
    """Write dx, contiguous, for x[O, K, I], from the partial sums of `channel_sums`; and, if D is 1, `grads`, those of
    the weight and the bias."""
    (O, _, I), t, (parts, _, _, C) = x.shape, tiling, part.shape
    _pull[t.grid](
        dy, x, mean, r, *affine, part, dx, *grads, *x.shape, t.i_tiles, t.tiles,
        dy.stride(0), dy.stride(1), x.stride(0), x.stride(1), C, D, parts, O * D * I,
        BQ=t.parts_at_once(parts * D), ACC=triton_acc(x.dtype), RELU=relu, TRAINING=training, **t.options,
    )  # fmt: skip


def _flat(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x as [O, K, I]: in the order of the memory of `like`, a tensor of its shape."""
    return x.movedim(1, -1).reshape(-1, x.shape[1], 1) if channels_last(like) else as_channels(x)


def forward(
    a: Args, *, elements: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x, w, b = a.x, a.w, a.b
    C, acc, y = x.shape[1], accumulator(x.dtype), empty_like(x)
    mean, r, new_mean, new_var = (torch.empty(C, dtype=acc, device=x.device) for _ in range(4))
    if not x.numel():
        return y, *_of_nothing(a.running_mean, a.running_var, a.eps, new_mean, new_var, mean, r)
    flat = _flat(x, x)
    w, b, *old = (None if v is None else v.contiguous() for v in (w, b, a.running_mean, a.running_var))
    t = Tiling.of(flat, elements, num_warps)
    part, parts = statistics(flat, tiling=t) if a.training else (None, 1)
    normalize(
        flat, part, parts, (w, b), y, mean, r, a.eps, tiling=t, C=C, old=(old[0], old[1]), new=(new_mean, new_var),
        momentum=a.momentum, relu=a.relu,
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
    a: Args,
    dy: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
    *,
    elements: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    x = a.x
    dx = empty_like(x)
    if not x.numel():
        return dx, None if a.w is None else torch.zeros_like(a.w), None if a.b is None else torch.zeros_like(a.b)
    flat, dys = _flat(x, x), _flat(dy, x)
    scale, shift = (None if v is None else v.contiguous() for v in (a.w, a.b))
    dw, db = (None if v is None else torch.empty_like(v) for v in (scale, shift))
    t = Tiling.of(flat, elements, num_warps)
    part = channel_sums(dys, flat, mean, r, tiling=t, C=x.shape[1], relu=(scale, shift) if a.relu else None)
    pull(dys, flat, mean, r, (scale, shift), part, dx, (dw, db), tiling=t, relu=a.relu, training=a.training)
    return dx, dw, db
