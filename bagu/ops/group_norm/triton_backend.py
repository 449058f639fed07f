"""GroupNorm on Triton: a group of one sample is a contiguous row of D channels of I values.

Bandwidth is the limit. Rows that fit a program's registers, as [D, I] tiles, are read and written once. In backward
a program keeps its groups and loops over the batch, so dw and db are summed in registers:

    db = sum_i dy        dw = sum_i dy * xhat        (per channel; their sums with w give mean(g) and mean(g * xhat))
    dx = r * (g - mean(g) - xhat * mean(g * xhat))        g = dy * w

Rows that are longer, or too few to fill the device, use batch_norm's kernels: each row is split over programs, and read
a second time for the outputs. If samples are contiguous and rows are not short, flat_kernels reads them independently
of channels, because loads by channel are narrow if a channel's length is not a multiple of 8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.batch_norm.tiling import Tiling, as_channels
from bagu.ops.batch_norm.triton_backend import channel_sums, normalize, pull, statistics
from bagu.ops.contract.signature import accumulator
from bagu.ops.group_norm.flat_kernels import run_backward, run_forward
from bagu.ops.group_norm.spec import Args
from bagu.ops.kernels.column_sum import column_sum, column_sums
from bagu.ops.kernels.launch import next_power_of_2, num_sms, triton_acc
from bagu.ops.kernels.scalars import int64, rsqrt

MAX_TILE = 16384  # values of a row, rounded up to a tile, kept in registers
SHORT = 4096  # up to this length a row is too short to be worth splitting
FEW = 16  # up to this many channels, flat_kernels gathers their sums faster than a tile of aligned planes computes them
FLAT = 256  # from this length on a row is worth a program that loops over the batch
TUNABLE = {  # the tests run every combination
    "forward": {"block_m": (1, 4), "num_warps": (4, 8)},
    "backward": {"block_g": (1, 4), "num_warps": (4, 8)},
}


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, r_ptr, M, groups, D, I, b_stride, c_stride, eps,
    BM: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    d, i = tl.arange(0, BD), tl.arange(0, BI)
    c = (m % groups * D)[:, None] + d[None, :]
    channel = (m < M)[:, None] & (d < D)[None, :]
    real = channel[:, :, None] & (i < I)[None, None, :]
    at = (m // groups).to(tl.int64)[:, None] * b_stride + c.to(tl.int64) * c_stride
    x = tl.load(x_ptr + at[:, :, None] + i[None, None, :], real, 0.0).to(ACC)
    mean = tl.sum(tl.sum(x, axis=2), axis=1) / (D * I)
    off = tl.where(real, x - mean[:, None, None], 0.0)
    r = rsqrt(tl.sum(tl.sum(off * off, axis=2), axis=1) / (D * I) + eps)
    tl.store(mean_ptr + m, mean, m < M)
    tl.store(r_ptr + m, r, m < M)
    y = off * r[:, None, None]
    if w_ptr is not None:
        y *= tl.load(w_ptr + c, channel, 0.0).to(ACC)[:, :, None]
    if b_ptr is not None:
        y += tl.load(b_ptr + c, channel, 0.0).to(ACC)[:, :, None]
    out = m.to(tl.int64)[:, None, None] * (D * I) + (d * I)[None, :, None] + i[None, None, :]
    tl.store(y_ptr + out, y, real)


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, mean_ptr, r_ptr, dx_ptr, part_ptr, B, C, groups, D, I,
    dy_b_stride, dy_c_stride, x_b_stride, x_c_stride,
    BG: tl.constexpr, BD: tl.constexpr, BI: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0) * BG + tl.arange(0, BG)
    d, i = tl.arange(0, BD), tl.arange(0, BI)[None, None, :]
    c = (g * D)[:, None] + d[None, :]
    channel = (g < groups)[:, None] & (d < D)[None, :]
    real = channel[:, :, None] & (i < I)
    far = c.to(tl.int64)[:, :, None]
    w = tl.full([BG, BD], 1.0, ACC)
    if w_ptr is not None:
        w = tl.load(w_ptr + c, channel, 0.0).to(ACC)
    dw, db = tl.zeros([BG, BD], ACC), tl.zeros([BG, BD], ACC)
    for row in range(tl.program_id(1), B, tl.num_programs(1)):
        b = int64(row)
        dy = tl.load(dy_ptr + b * dy_b_stride + far * dy_c_stride + i, real, 0.0).to(ACC)
        x = tl.load(x_ptr + b * x_b_stride + far * x_c_stride + i, real, 0.0).to(ACC)
        mean = tl.load(mean_ptr + b * groups + g, g < groups, 0.0)
        r = tl.load(r_ptr + b * groups + g, g < groups, 0.0)[:, None, None]
        xhat = (x - mean[:, None, None]) * r
        sums, dots = tl.sum(dy, axis=2), tl.sum(dy * xhat, axis=2)
        along = tl.sum(sums * w, axis=1)[:, None, None] / (D * I)
        pull = tl.sum(dots * w, axis=1)[:, None, None] / (D * I)
        tl.store(dx_ptr + (b * C + far) * I + i, r * (dy * w[:, :, None] - along - xhat * pull), real)
        db += sums
        dw += dots
    part = part_ptr + int64(tl.program_id(1)) * 2 * C + c
    tl.store(part, db, channel)
    tl.store(part + C, dw, channel)


def _flat(groups: int, *tensors: torch.Tensor) -> bool:
    """Whether flat_kernels supports these [B, C, I]: contiguous aligned samples, and rows that a program can own."""
    (B, C, I), narrow = tensors[0].shape, tensors[0].element_size() <= 2
    N = C // groups * I
    most = MAX_TILE if narrow or len(tensors) == 1 else MAX_TILE // 2  # two fp32 tensors spill
    fills = N <= SHORT or B * groups >= num_sms(tensors[0].device)
    lie_well = all(t.stride(1) == I and t.stride(0) % 8 == 0 for t in tensors) and C * I % 8 == 0
    return I >= 8 and FLAT <= N and (N if N % 8 == 0 else N + 7) <= most and fills and lie_well


def _fits(x: torch.Tensor, groups: int, whole: int) -> tuple[int, int] | None:
    """The tile [D, I] for a row of x[B, C, I] that one program can own, or None if rows must be split."""
    B, C, I = x.shape
    d, i = next_power_of_2(C // groups), next_power_of_2(I)
    enough = d * i <= SHORT or B * groups >= num_sms(x.device)
    return (d, i) if d * i <= whole and enough else None


def forward(
    a: Args, *, block_m: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x, groups = a.x, a.groups
    (B, C), acc = x.shape[:2], accumulator(x.dtype)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, r = (torch.empty(B, groups, dtype=acc, device=x.device) for _ in range(2))
    if not x.numel():
        return y, mean, r
    flat, w, b = as_channels(x), *(None if v is None else v.contiguous() for v in (a.w, a.b))
    if _flat(groups, flat):
        run_forward(a._replace(x=flat, w=w, b=b), y, mean, r, num_warps)
        return y, mean, r
    D, I, M = C // groups, flat.shape[2], B * groups
    if (tile := _fits(flat, groups, MAX_TILE)) is None:
        rows = flat.contiguous().view(1, M, D * I)
        part, parts = statistics(rows, tiling=Tiling.of(rows, None, num_warps))
        planes = rows.view(1, B * C, I)
        t = Tiling.of(planes, None, num_warps)
        normalize(planes, part, parts, (w, b), y, mean, r, a.eps, tiling=t, C=C, D=D)
        return y, mean, r
    size = tile[0] * tile[1]
    block_m = block_m or max(1, min(2048 // size, next_power_of_2(M)))
    _forward[(triton.cdiv(M, block_m),)](
        flat, w, b, y, mean, r, M, groups, D, I, flat.stride(0), flat.stride(1), a.eps,
        BM=block_m, BD=tile[0], BI=tile[1], ACC=triton_acc(x.dtype),
        num_warps=num_warps or min(max(block_m * size // 512, 1), 16),
    )  # fmt: skip
    return y, mean, r


def backward(
    a: Args,
    dy: torch.Tensor,
    mean: torch.Tensor,
    r: torch.Tensor,
    *,
    block_g: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    x, w, groups = a.x, a.w, a.groups
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return dx, None if w is None else torch.zeros_like(w), None if a.b is None else torch.zeros_like(a.b)
    flat, dys, scale = as_channels(x), as_channels(dy), None if w is None else w.contiguous()
    B, C, I = flat.shape
    D = C // groups
    if (I % 8 or D <= FEW) and _flat(groups, flat, dys):
        part = run_backward(a._replace(x=flat, w=scale), dys, mean, r, dx, num_warps)
    # an odd I is read value by value, and the addresses take registers: ptxas spills at 16384
    elif (tile := _fits(flat, groups, MAX_TILE if I % 8 == 0 else MAX_TILE // 2)) is None:
        planes, dplanes = flat.contiguous().view(1, B * C, I), dys.contiguous().view(1, B * C, I)
        t = Tiling.of(planes, None, num_warps)
        part = channel_sums(dplanes, planes, mean, r, tiling=t, C=C, D=D)
        pull(dplanes, planes, mean, r, (scale, None), part, dx, tiling=t, D=D)
    else:
        size = tile[0] * tile[1]
        block_g = block_g or max(1, min(2048 // size, next_power_of_2(groups)))
        across = triton.cdiv(groups, block_g)
        programs = max(1, min(B, 4 * num_sms(x.device) // across))
        part = torch.empty(programs, 2, C, dtype=r.dtype, device=x.device)
        _backward[(across, programs)](
            dys, flat, scale, mean, r, dx, part, B, C, groups, D, I,
            dys.stride(0), dys.stride(1), flat.stride(0), flat.stride(1),
            BG=block_g, BD=tile[0], BI=tile[1], ACC=triton_acc(x.dtype),
            num_warps=num_warps or min(max(block_g * size // 512, 1), 32),
            enable_fp_fusion=False,  # a group of one value must have dx = 0; a fused multiply-add breaks this
        )  # fmt: skip
    return dx, *_weight_gradients(part.view(-1, 2, C), w, a.b)


def _weight_gradients(
    part: torch.Tensor, w: torch.Tensor | None, b: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dw and db, from the partial sums [P, 2, C] of db and dw that the programs wrote."""
    if w is None or b is None:
        own = [None if v is None else column_sum(part[:, i], v.dtype) for i, v in ((1, w), (0, b))]
        return own[0], own[1]
    db, dw = column_sums(part.transpose(0, 1), b.dtype, w.dtype)
    return dw, db
