"""Group assignment on Triton: the assignment [T, G] is never stored. A program owns an image and a block of features in
the forward, an image and a block of tokens in the backward, and generates the noise of its tokens."""

import torch
import triton
import triton.language as tl

from bagu.ops.contract.signature import accumulator
from bagu.ops.group_assign.spec import Args
from bagu.ops.gumbel_softmax.wide_kernels import noisy
from bagu.ops.kernels.launch import as_rows, fp32_pair, next_power_of_2, triton_acc
from bagu.ops.kernels.scalars import int64

TUNABLE = {  # the tests run every combination
    "forward": {"block_t": (16, 32), "block_d": (16, 64)},
    "backward": {"block_t": (16, 32), "block_d": (16, 64)},
}


@triton.jit
def _assigned(
    s_ptr, b, t, T, G, s_stride, cool, cool_low, seed, HARD: tl.constexpr, NOISE: tl.constexpr, GROUPS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """(share, soft) [tokens, GROUPS] of the tokens t[tokens, 1] of image b; 0 past the end."""
    g = tl.arange(0, GROUPS)[None, :]
    real = (t < T) & (g < G)
    m = b * T + t
    if NOISE:
        z = noisy(s_ptr, m, g, tl.arange(0, GROUPS // 4)[None, :], real, s_stride, cool, cool_low, seed, ACC)
    else:
        z = tl.load(s_ptr + m * s_stride + g, real, -float("inf")).to(ACC) * (tl.zeros([], ACC) + cool + cool_low)
    top = tl.max(z, axis=1, keep_dims=True)
    e = tl.exp2((z - top) * 1.4426950408889634)  # NaN past the end
    total = tl.sum(e, axis=1, keep_dims=True)
    soft = tl.where(t < T, e / total, 0.0)
    share = soft
    if HARD:
        first = tl.min(tl.where(z == top, g, GROUPS), axis=1, keep_dims=True)
        share = tl.where(real, tl.where(g == first, 1.0, 0.0) + (total - total), 0.0)  # adds NaN in a row with NaN
    return share, soft


@triton.jit(do_not_specialize=["seed"])
def _forward(
    s_ptr, v_ptr, y_ptr, mass_ptr, T, G, D, s_stride, v_batch, v_row, cool, cool_low, seed, eps, HARD: tl.constexpr,
    NOISE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    b = int64(tl.program_id(0))
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    sums = tl.zeros([GROUPS, BLOCK_D], ACC)
    mass = tl.zeros([GROUPS], ACC)
    for start in range(0, T, BLOCK_T):
        t = int64(start) + tl.arange(0, BLOCK_T)[:, None]
        share, _ = _assigned(s_ptr, b, t, T, G, s_stride, cool, cool_low, seed, HARD, NOISE, GROUPS, ACC)
        v = tl.load(v_ptr + b * v_batch + t * v_row + d, (t < T) & (d < D), 0.0).to(ACC)
        sums = tl.dot(tl.trans(share), v, sums, input_precision="ieee", out_dtype=ACC)
        mass += tl.sum(share, axis=0)
    g = tl.arange(0, GROUPS)
    y = sums / (mass + eps)[:, None]
    tl.store(y_ptr + (b * G + g[:, None]) * D + d, y, (g[:, None] < G) & (d < D))
    tl.store(mass_ptr + b * G + g, mass, (g < G) & (tl.program_id(1) == 0))


@triton.jit(do_not_specialize=["seed"])
def _backward(
    s_ptr, v_ptr, y_ptr, dy_ptr, mass_ptr, ds_ptr, dv_ptr, T, G, D, s_stride, v_batch, v_row, cool, cool_low, seed, eps,
    HARD: tl.constexpr, NOISE: tl.constexpr, GROUPS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    b = int64(tl.program_id(0))
    t = int64(tl.program_id(1)) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    g = tl.arange(0, GROUPS)
    share, soft = _assigned(s_ptr, b, t, T, G, s_stride, cool, cool_low, seed, HARD, NOISE, GROUPS, ACC)
    scale = 1.0 / (tl.load(mass_ptr + b * G + g, g < G, 1.0) + eps)
    dshare = tl.zeros([BLOCK_T, GROUPS], ACC)
    own = tl.zeros([GROUPS], ACC)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)[None, :]
        held = (g[:, None] < G) & (d < D)
        at = (b * G + g[:, None]) * D + d
        per = tl.load(dy_ptr + at, held, 0.0).to(ACC) * scale[:, None]
        own += tl.sum(per * tl.load(y_ptr + at, held, 0.0).to(ACC), axis=1)
        v = tl.load(v_ptr + b * v_batch + t * v_row + d, (t < T) & (d < D), 0.0).to(ACC)
        dshare = tl.dot(v, tl.trans(per), dshare, input_precision="ieee", out_dtype=ACC)
        dv = tl.dot(share, per, input_precision="ieee", out_dtype=ACC)
        tl.store(dv_ptr + (b * T + t) * D + d, dv, (t < T) & (d < D))
    dshare = dshare - own[None, :]
    dz = soft * (dshare - tl.sum(soft * dshare, axis=1, keep_dims=True))
    ds = dz * (tl.zeros([], ACC) + cool + cool_low)
    tl.store(ds_ptr + (b * T + t) * G + g[None, :], ds, (t < T) & (g[None, :] < G))


def forward(args: Args, *, block_t: int | None = None, block_d: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    (B, T, G), D = args.scores.shape, args.values.shape[2]
    y = args.scores.new_empty(B, G, D)
    mass = args.scores.new_empty(B, G, dtype=accumulator(args.scores.dtype))
    if not y.numel():
        return y, mass.zero_()
    scores, values, shape = _prepared(args, block_t, block_d)
    _forward[(B, triton.cdiv(D, shape["BLOCK_D"]))](
        scores, values, y, mass, T, G, D, *_scalars(args, scores, values), **shape
    )
    return y, mass


def backward(
    args: Args,
    dy: torch.Tensor,
    y: torch.Tensor,
    mass: torch.Tensor,
    *,
    block_t: int | None = None,
    block_d: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    (B, T, G), D = args.scores.shape, args.values.shape[2]
    ds, dv = args.scores.new_empty(B, T, G), args.values.new_empty(B, T, D)
    if not B * T * G:
        return ds, dv.zero_()
    scores, values, shape = _prepared(args, block_t, block_d)
    _backward[(B, triton.cdiv(T, shape["BLOCK_T"]))](
        scores, values, y.contiguous(), dy.contiguous(), mass.contiguous(), ds, dv, T, G, D,
        *_scalars(args, scores, values), **shape,
    )  # fmt: skip
    return ds, dv


def _prepared(
    args: Args, block_t: int | None, block_d: int | None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, int | bool]]:
    values = args.values if args.values.stride(2) == 1 else args.values.contiguous()
    groups = max(next_power_of_2(args.scores.shape[2]), 16)  # tl.dot needs 16
    shape = {
        "HARD": args.hard,
        "NOISE": args.noise,
        "GROUPS": groups,
        "ACC": triton_acc(args.scores.dtype),
        "BLOCK_T": block_t or (32 if groups < 64 else 16),
        "BLOCK_D": block_d or min(max(next_power_of_2(args.values.shape[2]), 16), 64 if groups < 64 else 32),
        "num_warps": 4,
    }
    return as_rows(args.scores), values, shape


def _scalars(args: Args, scores: torch.Tensor, values: torch.Tensor) -> tuple[float | int, ...]:
    return (scores.stride(0), values.stride(0), values.stride(1), *fp32_pair(1 / args.tau), args.seed, args.eps)
