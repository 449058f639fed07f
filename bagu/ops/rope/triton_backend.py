"""Rotary position embedding on Triton: one program owns all (or many) heads of a token.

Memory is the limit: x is read once and y is written once. A program reads a token's row of the tables once for all its
heads. x may have any strides if a head is contiguous: queries inside a fused qkv, or [B, H, T, D] transposed. It is
addressed by batch, token and head stride, and y is contiguous. Adjacent pairs are loaded together and separated in
registers, so both layouts use 128-bit loads. Backward is the same kernel with sin negated.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import next_power_of_2, triton_acc
from bagu.ops.rope.spec import Args

TUNABLE = {  # the tests run every combination
    "forward": {"block": (64, 2048), "num_warps": (2, 4)},
    "backward": {"block": (64, 2048), "num_warps": (2, 4)},
}


@triton.jit(do_not_specialize=["TOKENS", "T", "H"])
def _rotate(
    x_ptr, cos_ptr, sin_ptr, pos_ptr, y_ptr, TOKENS, T, H, b_stride, t_stride, h_stride,
    D: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_REST: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(H, BLOCK_H)
    i = (tl.program_id(0) // across).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # token
    h = (tl.program_id(0) % across).to(tl.int64) * BLOCK_H + tl.arange(0, BLOCK_H)
    r = tl.arange(0, BLOCK_R)
    x = x_ptr + (i // T * b_stride + i % T * t_stride)[:, None, None] + (h * h_stride)[None, :, None]
    y = y_ptr + (i * H * D)[:, None, None] + (h * D)[None, :, None]
    real = (i < TOKENS)[:, None, None] & (h < H)[None, :, None]
    first, both = r[None, None, :], tl.arange(0, 2 * BLOCK_R)[None, None, :]
    if INTERLEAVED:  # load x before the tables, whose address depends on the positions
        pair = tl.load(x + both, real & (both < 2 * R), 0.0, eviction_policy="evict_last").to(ACC)
        a, b = tl.split(tl.reshape(pair, [BLOCK_T, BLOCK_H, BLOCK_R, 2]))
    else:
        a = tl.load(x + first, real & (first < R), 0.0, eviction_policy="evict_last").to(ACC)
        b = tl.load(x + R + first, real & (first < R), 0.0, eviction_policy="evict_last").to(ACC)
    p = i % T if pos_ptr is None else tl.load(pos_ptr + i, i < TOKENS, 0).to(tl.int64)
    at, known = p[:, None] * R + r[None, :], (i < TOKENS)[:, None] & (r < R)[None, :]
    c = tl.load(cos_ptr + at, known, 0.0).to(ACC)[:, None, :]
    s = tl.load(sin_ptr + at, known, 0.0).to(ACC)[:, None, :]
    if INVERSE:
        s = -s
    ya, yb = a * c - b * s, b * c + a * s
    if INTERLEAVED:
        tl.store(y + both, tl.reshape(tl.join(ya, yb), [BLOCK_T, BLOCK_H, 2 * BLOCK_R]), real & (both < 2 * R))
    else:
        tl.store(y + first, ya, real & (first < R))
        tl.store(y + R + first, yb, real & (first < R))
    if D > 2 * R:
        rest = 2 * R + tl.arange(0, BLOCK_REST)[None, None, :]
        tl.store(y + rest, tl.load(x + rest, real & (rest < D)), real & (rest < D))


def _most_heads(x: torch.Tensor) -> int:
    """The most heads of a token that a program takes: a few if tokens are nearer in memory than heads, else all."""
    return 4 if x.stride(1) < x.stride(2) else x.shape[2]


def _run(args: Args, inverse: bool, block: int | None, num_warps: int | None) -> tuple[torch.Tensor]:
    x = args.x
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return (y,)
    x = x.unsqueeze(0) if x.ndim < 4 else x.flatten(0, -4)
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    (B, T, H, D), R = x.shape, args.cos.shape[1]
    pairs = next_power_of_2(R)
    share = max((block or 2048) // pairs, 1)  # heads of any token per program
    block_h = min(share, next_power_of_2(min(_most_heads(x), H)))
    block_t = min(share // block_h, next_power_of_2(B * T))
    _rotate[(triton.cdiv(B * T, block_t) * triton.cdiv(H, block_h),)](
        x, args.cos.contiguous(), args.sin.contiguous(),
        None if args.positions is None else args.positions.contiguous(), y,
        B * T, T, H, x.stride(0), x.stride(1), x.stride(2),
        D=D, R=R, INTERLEAVED=args.layout == "interleaved", INVERSE=inverse,
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_R=pairs, BLOCK_REST=next_power_of_2(D - 2 * R),
        ACC=triton_acc(x.dtype), num_warps=num_warps or max(1, min(8, block_t * block_h * pairs // 256)),
    )  # fmt: skip
    return (y,)


def forward(args: Args, *, block: int | None = None, num_warps: int | None = None) -> tuple[torch.Tensor]:
    return _run(args, False, block, num_warps)


def backward(
    args: Args, dy: torch.Tensor, *, block: int | None = None, num_warps: int | None = None
) -> tuple[torch.Tensor]:
    return _run(args._replace(x=dy), True, block, num_warps)
