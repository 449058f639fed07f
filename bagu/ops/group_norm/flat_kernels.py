"""GroupNorm for planes of any size: a group of one sample, D channels of I values, is one run cut into eights.

A plane of 27 x 27 values starts at any offset, so a tile [D, I] of planes moves 16 bits at a time. A sample starts at a
multiple of 16 bytes if C * I is a multiple of 8. The sample is cut into eights of values across groups and channels: an
eight lies in one channel, or in two if a channel ends in it (I >= 8), so two values of w and two of b are enough for
eight values of x. If D * I is not a multiple of 8, a run shares its first and its last eight with its neighbours.
Forward reads and writes those value by value. Backward has no registers left for that: it reads them whole and ignores
the neighbours' values.

A program keeps its group and loops over the batch, prefetching into shared memory. Backward sums dy and
dy * (x - mean) of each eight over the batch, separately before and after a channel's end; at the end it gathers the
sums by channel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from bagu.ops.group_norm.spec import Args
from bagu.ops.kernels.launch import next_power_of_2, num_sms, triton_acc
from bagu.ops.kernels.scalars import int64, rsqrt

SHARED = 220 * 1024  # bytes of shared memory that a program may prefetch into; a Hopper SM has 227 KiB
CHANNELS = 8  # whose sums are gathered at once; with more, registers spill


@triton.jit
def _first(upto, more):
    """Which places of each eight are among its first `upto`. `more` is 8 or more.

    The minimum with `more` does not change the result. A `more` that depends on the current row makes the result depend
    on the row too. Otherwise the compiler keeps J x 8 results, and the w of each place, in registers from row to row,
    and spills. A different `more` gives a separate result.
    """
    return tl.arange(0, 8)[None, :] < tl.minimum(upto, more)[:, None]


@triton.jit
def _pair(ptr, first, c, D, nothing, J: tl.constexpr, ACC: tl.constexpr):
    """The values of a per-channel vector for each eight: of the channel it begins in, and of the next channel."""
    if ptr is None:
        return tl.full([J], nothing, ACC), tl.full([J], nothing, ACC)
    else:
        here = tl.load(ptr + first + c, c < D, 0.0).to(ACC)
        return here, tl.load(ptr + first + c + 1, c + 1 < D, 0.0).to(ACC)


@triton.jit
def _whole(g, N, I, J: tl.constexpr):
    """Group g's whole eights in a sample: the start of the first, their places [J, 8], which of them exist, the channel
    that each begins in, and how many places of that channel remain.
    """
    start = int64(g) * N
    first = (start + 7) // 8 * 8
    skip = (first - start).to(tl.int32)  # places of the run before its first whole eight
    at = 8 * tl.arange(0, J)
    c = (skip + at) // I
    i = at[:, None] + tl.arange(0, 8)[None, :]
    return first, i, (skip + at + 8 <= N)[:, None], c, (c + 1) * I - skip - at


@triton.jit
def _ends(g, N, I):
    """The places [2, 8] of group g in the eights that it shares, counted from the first whole one; which of them belong
    to the group; and their channels.
    """
    start = int64(g) * N
    skip = ((start + 7) // 8 * 8 - start).to(tl.int32)
    last = (N - skip) // 8 * 8
    i = (last + 8) * tl.arange(0, 2)[:, None] - 8 + tl.arange(0, 8)[None, :]
    own = (i >= -skip) & (i < N - skip) & ((i < 0) | (i >= last))
    return i, own, (skip + i) // I


@triton.jit
def _total(a):
    return tl.sum(tl.sum(a, axis=1), axis=0)


@triton.jit
def _forward(
    x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, r_ptr, B, groups, D, I, x_eights, y_eights, eps,
    J: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    g, N = tl.program_id(0), D * I
    first, i, whole, c, left = _whole(g, N, I, J)
    w0, w1 = _pair(w_ptr, g * D, c, D, 1.0, J, ACC)
    b0, b1 = _pair(b_ptr, g * D, c, D, 0.0, J, ACC)
    e, own, d = _ends(g, N, I)
    x_end = tl.zeros([2, 8], ACC)
    if not ALIGNED:  # prefetch a row's ends while the previous row is processed
        x_end = tl.load(x_ptr + int64(tl.program_id(1)) * x_eights * 8 + first + e, own, 0.0).to(ACC)
    for row in tl.range(tl.program_id(1), B, tl.num_programs(1), num_stages=STAGES):
        x_row, y_row = x_ptr + int64(row) * x_eights * 8 + first, y_ptr + int64(row) * y_eights * 8 + first
        x = tl.load(x_row + i, whole, 0.0).to(ACC)
        mean = _total(x) / N if ALIGNED else (_total(x) + _total(x_end)) / N
        off = tl.where(whole, x - mean, 0.0)
        squares = _total(off * off)
        if not ALIGNED:
            later = int64(tl.num_programs(1)) * x_eights * 8
            ahead = tl.load(x_row + later + e, own & (row + tl.num_programs(1) < B), 0.0).to(ACC)
            off_end = tl.where(own, x_end - mean, 0.0)
            squares += _total(off_end * off_end)
        r = rsqrt(squares / N + eps)
        tl.store(mean_ptr + int64(row) * groups + g, mean)
        tl.store(r_ptr + int64(row) * groups + g, r)
        y, before = off * r, _first(left, 8)
        if w_ptr is not None:
            y *= tl.where(before, w0[:, None], w1[:, None])
        if b_ptr is not None:
            y += tl.where(before, b0[:, None], b1[:, None])
        tl.store(y_row + i, y, whole)
        if not ALIGNED:
            y = off_end * r
            if w_ptr is not None:
                y *= tl.load(w_ptr + g * D + d, own, 0.0).to(ACC)
            if b_ptr is not None:
                y += tl.load(b_ptr + g * D + d, own, 0.0).to(ACC)
            tl.store(y_row + e, y, own)
            x_end = ahead


@triton.jit
def _place(g, N, ALIGNED: tl.constexpr):
    """The number of places before the run in group g's first eight, and the start of that eight in a sample."""
    start = int64(g) * N
    if ALIGNED:
        return 0, start // 8 * 8
    else:
        return (start % 8).to(tl.int32), start // 8 * 8


@triton.jit
def _eights(lead, I, J: tl.constexpr):
    """For J eights that hold a run, where the first has `lead` places before the run: the channel that each begins in,
    and the number of places until that channel ends.
    """
    start = 8 * tl.arange(0, J) - lead
    c = tl.maximum(start, 0) // I
    return c, (c + 1) * I - start


@triton.jit
def _read(ptr, lead, N, J: tl.constexpr, ALIGNED: tl.constexpr, ACC: tl.constexpr):
    """The run as eights [J, 8]; places outside the run are 0."""
    at = 8 * tl.arange(0, J)[:, None]
    i = at + tl.arange(0, 8)[None, :]
    x = tl.load(ptr + i, at < lead + N, 0.0).to(ACC)
    if ALIGNED:
        return x
    else:
        return tl.where((i >= lead) & (i < lead + N), x, 0.0)


@triton.jit
def _write(ptr, y, lead, N, J: tl.constexpr):
    """Write the run's whole eights to `ptr`, 128 bits at a time."""
    at = 8 * tl.arange(0, J)[:, None]
    tl.store(ptr + at + tl.arange(0, 8)[None, :], y, (at >= lead) & (at + 8 <= lead + N))


@triton.jit
def _write_ends(ptr, y, lead, N, J: tl.constexpr):
    """Write the eights that a run shares, value by value."""
    at = 8 * tl.arange(0, J)[:, None]
    i, whole = at + tl.arange(0, 8)[None, :], (at >= lead) & (at + 8 <= lead + N)
    tl.store(ptr + i, y, (i >= lead) & (i < lead + N) & (whole == 0))


@triton.jit
def _backward(
    dy_ptr, x_ptr, w_ptr, mean_ptr, r_ptr, dx_ptr, part_ptr, B, C, groups, D, I, dy_eights, x_eights, dx_eights,
    J: tl.constexpr, BD: tl.constexpr, ALIGNED: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    g, N = tl.program_id(0), D * I
    lead, at = _place(g, N, ALIGNED)
    c, left = _eights(lead, I, J)
    w0, w1 = _pair(w_ptr, g * D, c, D, 1.0, J, ACC)
    db0, db1, dw0, dw1 = tl.zeros([J], ACC), tl.zeros([J], ACC), tl.zeros([J], ACC), tl.zeros([J], ACC)
    for row in tl.range(tl.program_id(1), B, tl.num_programs(1), num_stages=STAGES):
        dy_row, x_row = dy_ptr + int64(row) * dy_eights * 8 + at, x_ptr + int64(row) * x_eights * 8 + at
        dx_row = dx_ptr + int64(row) * dx_eights * 8 + at
        dy = _read(dy_row, lead, N, J, ALIGNED, ACC)
        x = _read(x_row, lead, N, J, ALIGNED, ACC)
        mean, r = tl.load(mean_ptr + int64(row) * groups + g), tl.load(r_ptr + int64(row) * groups + g)
        off, before = x - mean, _first(left, N + row)
        sum0 = tl.sum(tl.where(before, dy, 0.0), axis=1)
        sum1 = tl.sum(tl.where(before, 0.0, dy), axis=1)
        dot0 = tl.sum(tl.where(before, dy * off, 0.0), axis=1)
        dot1 = tl.sum(tl.where(before, 0.0, dy * off), axis=1)
        along = tl.sum(sum0 * w0 + sum1 * w1, axis=0) / N
        pull = r * r * tl.sum(dot0 * w0 + dot1 * w1, axis=0) / N
        w = tl.where(_first(left, N + row + 1), w0[:, None], w1[:, None])
        dx = r * (dy * w - along - off * pull)
        _write(dx_row, dx, lead, N, J)
        if not ALIGNED:  # from registers: forward's method spills here
            _write_ends(dx_row, dx, lead, N, J)
        db0 += sum0
        db1 += sum1
        dw0 += r * dot0
        dw1 += r * dot1
    part = part_ptr + int64(tl.program_id(1)) * 2 * C + g * D
    for start in range(0, D, BD):
        d = start + tl.arange(0, BD)
        own, next = c[None, :] == d[:, None], c[None, :] + 1 == d[:, None]
        db = tl.where(own, db0[None, :], 0.0) + tl.where(next, db1[None, :], 0.0)
        dw = tl.where(own, dw0[None, :], 0.0) + tl.where(next, dw1[None, :], 0.0)
        tl.store(part + d, tl.sum(db, axis=1), d < D)
        tl.store(part + C + d, tl.sum(dw, axis=1), d < D)


def _launch(
    x: torch.Tensor, groups: int, *, tensors: int, per_sm: int, per_warp: int, most_warps: int, num_warps: int | None
) -> tuple[int, dict[str, Any]]:
    """Programs along the batch of x[B, C, I], and the constants of a launch that reads `tensors` tensors of its size.

    An SM processes `per_sm` values of x at a time, or one tile, and a warp processes `per_warp`: more would spill.
    """
    B, C, I = x.shape
    N = C // groups * I
    aligned = N % 8 == 0
    tile = next_power_of_2(N if aligned else N + 7)
    programs = max(1, min(B, max(1, per_sm // tile) * num_sms(x.device) // groups))
    ahead = 2 * tensors * tile * x.element_size() <= SHARED  # two stages are slower than none: 0.44 of copy, not 0.72
    warps = num_warps or min(max(tile // per_warp, 1), most_warps)
    options = {"J": tile // 8, "ALIGNED": aligned, "STAGES": 3 if ahead else 1, "ACC": triton_acc(x.dtype)}
    return programs, options | {"num_warps": warps}


def run_forward(a: Args, y: torch.Tensor, mean: torch.Tensor, r: torch.Tensor, num_warps: int | None) -> None:
    """Write y, mean and r of x[B, C, I]: samples are contiguous and start at multiples of 8, and I is at least 8."""
    x, groups = a.x, a.groups
    B, C, I = x.shape
    programs, options = _launch(x, groups, tensors=1, per_sm=16384, per_warp=2048, most_warps=8, num_warps=num_warps)
    _forward[(groups, programs)](
        x, a.w, a.b, y, mean, r, B, groups, C // groups, I, x.stride(0) // 8, C * I // 8, a.eps, **options
    )


def run_backward(
    a: Args, dy: torch.Tensor, mean: torch.Tensor, r: torch.Tensor, dx: torch.Tensor, num_warps: int | None
) -> torch.Tensor:
    """Write dx and return the partial sums of db and dw; dy and x have the layout that `run_forward` requires."""
    x, groups = a.x, a.groups
    B, C, I = x.shape
    D = C // groups
    most_warps = 16 if D * I % 8 == 0 else 8  # from ptxas's register counts: the other number spills
    programs, options = _launch(
        x, groups, tensors=2, per_sm=8192, per_warp=1024, most_warps=most_warps, num_warps=num_warps
    )
    part = torch.empty(programs, 2, C, dtype=r.dtype, device=x.device)
    _backward[(groups, programs)](
        dy, x, a.w, mean, r, dx, part, B, C, groups, D, I, dy.stride(0) // 8, x.stride(0) // 8, C * I // 8,
        BD=min(next_power_of_2(D), CHANNELS), **options,
    )  # fmt: skip
    return part
