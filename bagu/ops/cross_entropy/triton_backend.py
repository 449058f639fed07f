"""Cross-entropy on Triton. Memory traffic is the cost: forward reads the logits once, backward reads and writes once.

Forward reads a row in blocks of R groups of G words, 16 bytes per group. Each lane keeps its own running maximum and
sum, and the lanes are combined once, at the end of the row. A group shares one maximum, so a word costs 1 1/G exps
instead of 2 (at 2 the exp units, 16 results per clock and multiprocessor, are slower than the memory). If there are few
long rows, they are split over programs, and `_combine` joins the parts. Backward has the row's lse, so blocks are
independent. lse is kept in two parts, the maximum and the log of the sum: added in fp32 they lose the log if the logits
are large.

    dx = dy * ((1 + 2 z lse) * exp(x - base - rest) - (1 - s) * [v = t] - s / V)        lse = base + rest

Groups start at 16-byte boundaries, not at the start of the row, so a row of odd length also has wide loads. The words
before the first whole group and after the last one, the row's ends, are loaded separately.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.contract.signature import accumulator
from bagu.ops.cross_entropy.spec import Args
from bagu.ops.kernels.launch import as_rows, next_power_of_2, num_sms, triton_acc

TUNABLE = {  # the tests run every combination
    "forward": {"block": (1024, 4096), "splits": (1, 3), "num_warps": (4, 8)},
    "backward": {"block": (1024, 4096, 8192), "num_warps": (4, 8)},
}


@triton.jit
def exp(x):
    """e^x by tl.exp2, which flushes results below 1e-38 to 0; tl.exp keeps them and takes 3 more instructions."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _base(high):
    """The value to subtract before exp: the maximum, or 0 if it is infinite (inf - inf is NaN)."""
    return tl.where(tl.abs(high) == float("inf"), 0.0, high)


@triton.jit
def _groups(start, V, G: tl.constexpr):
    """For the row that starts at element `start`: the boundary before it, its distance from that, the whole groups."""
    lead = (start % G).to(tl.int32)
    return start // G * G, lead, (lead + G - 1) // G, (lead + V) // G


@triton.jit
def _ends(lead, first, last, V, G: tl.constexpr):
    """The positions of the words outside the whole groups: up to G - 1 on each side."""
    e = tl.arange(0, 2 * G)
    at = tl.where(e >= G, last * G + e - G, e)
    head = (e < G) & (at >= lead) & (at < first * G)
    tail = (e >= G) & (at >= first * G)
    return at, (head | tail) & (at < lead + V)


@triton.jit
def _finish(
    x_ptr, y_ptr, lse_ptr, base_ptr, m, start, V, target, kept, high, total, plain, smoothing, z_loss,
    ACC: tl.constexpr, SMOOTH: tl.constexpr, LOSS: tl.constexpr,
):  # fmt: skip
    """Write a row's loss and its lse in two parts, or its target's logit and its lse. A target outside the vocabulary
    is not loaded: NaN."""
    lse = _base(high) + tl.log(total)
    y = tl.load(x_ptr + start + target, (target >= 0) & (target < V), float("nan")).to(ACC)
    if LOSS:
        # differences from the maximum first: lse - y would lose log(total) to rounding if the logits are large
        y = tl.log(total) + (1.0 - smoothing) * (_base(high) - y)
        if SMOOTH:
            y += smoothing * (_base(high) - plain / V)
        if z_loss != 0.0:  # 0 * inf is NaN
            y += z_loss * lse * lse
        tl.store(base_ptr + m, tl.where(kept, _base(high), 0.0))
        lse = tl.log(total)
    tl.store(y_ptr + m, tl.where(kept, y, 0.0))
    tl.store(lse_ptr + m, tl.where(kept, lse, 0.0))


@triton.jit(do_not_specialize=["per_split"])
def _forward(
    x_ptr, t_ptr, y_ptr, lse_ptr, base_ptr, part_ptr, V, stride, ignore_index, smoothing, z_loss, per_split,
    R: tl.constexpr, G: tl.constexpr, ACC: tl.constexpr, SMOOTH: tl.constexpr, LOSS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    m, split = tl.program_id(0), tl.program_id(1)
    target = tl.load(t_ptr + m)
    kept = target != ignore_index
    start = m.to(tl.int64) * stride
    offset, lead, first, last = _groups(start, V, G)
    row, begin = x_ptr + offset, first + split * per_split
    end = tl.minimum(begin + per_split, last) * kept  # an ignored row is not read
    r, g = tl.arange(0, R), tl.arange(0, G)
    high, total, plain = tl.full([R], float("-inf"), ACC), tl.zeros([R], ACC), tl.zeros([R], ACC)
    for at in range(begin, end, R):
        real = ((at + r) < end)[:, None]
        x = tl.load(row + (at + r)[:, None] * G + g[None, :], real, float("-inf")).to(ACC)
        higher = tl.maximum(high, tl.max(x, axis=1))
        base = _base(higher)
        total = total * exp(high - base) + tl.sum(exp(x - base[:, None]), axis=1)
        high = higher
        if SMOOTH:
            plain += tl.sum(tl.where(real, x, 0.0), axis=1)

    where, mine = _ends(lead, first, last, V, G)
    mine = (mine & kept & (split == 0)) != 0  # Triton 3.9's interpreter computes a scalar & a tensor as int64
    ends = tl.load(row + where, mine, float("-inf")).to(ACC)
    top = tl.maximum(tl.max(high, axis=0), tl.max(ends, axis=0))
    shift = _base(top)
    mass = tl.sum(total * exp(high - shift), axis=0) + tl.sum(exp(ends - shift), axis=0)
    flat = tl.sum(plain, axis=0) + tl.sum(tl.where(mine, ends, 0.0), axis=0)
    if SPLIT:
        part = part_ptr + (m.to(tl.int64) * tl.num_programs(1) + split) * 3
        tl.store(part, top)
        tl.store(part + 1, mass)
        tl.store(part + 2, flat)
    else:
        _finish(
            x_ptr, y_ptr, lse_ptr, base_ptr, m, start, V, target, kept, top, mass, flat, smoothing, z_loss,
            ACC, SMOOTH, LOSS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["splits"])
def _combine(
    x_ptr, t_ptr, y_ptr, lse_ptr, base_ptr, part_ptr, V, stride, ignore_index, smoothing, z_loss, splits,
    S: tl.constexpr, ACC: tl.constexpr, SMOOTH: tl.constexpr, LOSS: tl.constexpr,
):  # fmt: skip
    m, s = tl.program_id(0), tl.arange(0, S)
    target = tl.load(t_ptr + m)
    part = part_ptr + (m.to(tl.int64) * splits + s) * 3
    high = tl.load(part, s < splits, float("-inf"))
    total = tl.load(part + 1, s < splits, 0.0)
    flat = tl.sum(tl.load(part + 2, s < splits, 0.0), axis=0)
    top = tl.max(high, axis=0)
    mass = tl.sum(total * exp(high - _base(top)), axis=0)
    start = m.to(tl.int64) * stride
    kept = target != ignore_index
    _finish(
        x_ptr, y_ptr, lse_ptr, base_ptr, m, start, V, target, kept, top, mass, flat, smoothing, z_loss,
        ACC, SMOOTH, LOSS,
    )  # fmt: skip


@triton.jit
def _slope(x, v, word, dy, pull, base, rest, V, smoothing, ACC: tl.constexpr, SMOOTH: tl.constexpr):
    """dx of the words v of one row. `exp` is written out: subtracting the second part of lse is its product's FMA."""
    d = pull * tl.exp2((x.to(ACC) - base) * 1.4426950408889634 - rest * 1.4426950408889634)
    if SMOOTH:
        d -= dy * (smoothing / V)
    return tl.where(v == word, d - dy * (1.0 - smoothing), d)


@triton.jit
def _backward(
    x_ptr, t_ptr, base_ptr, rest_ptr, dy_ptr, dx_ptr, V, stride, blocks, ignore_index, smoothing, z_loss,
    R: tl.constexpr, G: tl.constexpr, ACC: tl.constexpr, SMOOTH: tl.constexpr, ENDS: tl.constexpr,
):  # fmt: skip
    m, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    target = tl.load(t_ptr + m)
    kept = target != ignore_index
    word = tl.where((target >= 0) & (target < V), target, -1).to(tl.int32)  # 32 bits: compared with every v
    dy, base, rest = tl.where(kept, tl.load(dy_ptr + m), 0.0), tl.load(base_ptr + m), tl.load(rest_ptr + m)
    pull = dy
    if z_loss != 0.0:
        pull += dy * 2.0 * z_loss * (base + rest)
    # dx is contiguous; the host chooses G so that the rows of dx and x start at the same offset in a group
    x_offset = m.to(tl.int64) * stride // G * G
    dx_offset, lead, first, last = _groups(m.to(tl.int64) * V, V, G)
    group = first + block * R + tl.arange(0, R)[:, None]
    at = group * G + tl.arange(0, G)[None, :]
    x = tl.load(x_ptr + x_offset + at, ((group < last) & kept) != 0, 0.0)
    d = _slope(x, at - lead, word, dy, pull, base, rest, V, smoothing, ACC, SMOOTH)
    tl.store(dx_ptr + dx_offset + at, d, group < last)
    if ENDS and block == 0:
        end, real = _ends(lead, first, last, V, G)
        x_end = tl.load(x_ptr + x_offset + end, (real & kept) != 0, 0.0)
        d_end = _slope(x_end, end - lead, word, dy, pull, base, rest, V, smoothing, ACC, SMOOTH)
        tl.store(dx_ptr + dx_offset + end, d_end, real)


def reduce_rows(
    a: Args,
    y: torch.Tensor,
    lse: torch.Tensor,
    base: torch.Tensor | None = None,
    *,
    block: int | None = None,
    splits: int | None = None,
    num_warps: int | None = None,
) -> None:
    """Write each row's loss into `y`, its lse into `base` and `lse`, which are to be added; without `base` its target's
    logit into `y`, and its lse.

    The logits are [M, V] with unit stride along V; targets, y, lse and base are contiguous [M].
    """
    rows, scalars = a.logits, (a.ignore_index, a.label_smoothing, a.z_loss)
    (M, V), acc, G = rows.shape, triton_acc(rows.dtype), 16 // rows.element_size()
    block = min(block or 4096, max(next_power_of_2(V), 2 * G))
    # a program streams about 10 GB/s: with fewer than 8 per multiprocessor, long rows are split, 4 or more blocks per
    # part
    splits = splits or max(1, min(triton.cdiv(8 * num_sms(rows.device), M), V // (4 * block)))
    part = torch.empty(M, splits if splits > 1 else 0, 3, dtype=lse.dtype, device=rows.device)
    per_split = triton.cdiv(V // G, splits)
    shared = {"ACC": acc, "SMOOTH": a.label_smoothing != 0, "LOSS": base is not None}
    _forward[(M, splits)](
        rows, a.targets, y, lse, base, part, V, rows.stride(0), *scalars, per_split,
        R=block // G, G=G, SPLIT=splits > 1, num_warps=num_warps or min(max(block // (32 * G), 1), 4), **shared,
    )  # fmt: skip
    if splits > 1:
        _combine[(M,)](
            rows, a.targets, y, lse, base, part, V, rows.stride(0), *scalars, splits,
            S=next_power_of_2(splits), num_warps=1, **shared,
        )  # fmt: skip


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One program per row, whatever the number of rows. A row is read in groups of 16 bytes, and where they begin must
    not depend on its place in the batch: rows of another length are copied to a multiple of 16 words."""
    rows, V = as_rows(a.logits), a.logits.shape[-1]
    if V % 16:
        rows = torch.nn.functional.pad(rows, (0, -V % 16))[:, :V]
    return forward(a._replace(logits=rows), splits=1)


def forward(
    a: Args, *, block: int | None = None, splits: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    losses = torch.empty(a.targets.shape, dtype=accumulator(a.logits.dtype), device=a.logits.device)
    base, rest = torch.empty_like(losses), torch.empty_like(losses)
    if losses.numel():
        rows = a._replace(logits=as_rows(a.logits), targets=a.targets.reshape(-1).contiguous())
        reduce_rows(rows, losses, rest, base, block=block, splits=splits, num_warps=num_warps)
    return losses, base, rest


def backward(
    a: Args,
    dlosses: torch.Tensor,
    base: torch.Tensor,
    rest: torch.Tensor,
    *,
    block: int | None = None,
    num_warps: int | None = None,
) -> tuple[torch.Tensor]:
    dlogits = torch.empty_like(a.logits, memory_format=torch.contiguous_format)
    if not dlogits.numel():
        return (dlogits,)
    rows = as_rows(a.logits)
    (M, V), stride, G = rows.shape, rows.stride(0), 16 // rows.element_size()
    if (stride - V) % G:
        G = 1  # x and dx start at different offsets in a group: move single words
    block = min(block or 4096, max(next_power_of_2(V), 2 * G))
    blocks = max(1, triton.cdiv(V // G, block // G))
    _backward[(M * blocks,)](
        rows, *(x.reshape(-1).contiguous() for x in (a.targets, base, rest, dlosses)), dlogits,
        V, stride, blocks, a.ignore_index, a.label_smoothing, a.z_loss,
        R=block // G, G=G, ACC=triton_acc(a.logits.dtype), SMOOTH=a.label_smoothing != 0, ENDS=G > 1 and V % G != 0,
        num_warps=num_warps or min(max(block // 512, 1), 4),
    )  # fmt: skip
    return (dlogits,)
