"""LoRA adapters by slot on Triton: one launch for both products.

With few tokens, a program of `token_kernel` has one token and a range of outputs: A x and B (A x) are products of a
matrix and a vector, and the loads of A, B, x and y start together. The programs of other outputs compute the same A x
again: a second launch would be 1.3 us of a CUDA graph on an H200 before it reads anything. For 32 tokens of 8 adapters
this kernel takes 3.3 to 4.6 us in the layers of a 0.6B model, and the same products on tensor cores 7 to 8.

With more, a program of `tile_kernel` has a tile of tokens, a slot and a range of outputs, and computes with those of
its tokens that have this slot. If there is none it ends at once, so a pair is read only if a token has it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bagu.ops.kernels.launch import as_rows, next_power_of_2, num_sms, triton_acc
from bagu.ops.lora_add.spec import Args

FEW_TOKENS = 256  # above, tokens that share an adapter are many enough to share the reads of its pair
VALUES = 16384  # of A that a program of `token_kernel` holds at a time; of B twice as many
TILE = {"BM": 64, "BN": 64, "BK": 128, "num_warps": 8, "STAGES": 3}


@triton.jit
def token_kernel(
    x_ptr, a_ptr, b_ptr, slots_ptr, y_ptr, L, N, K, R, x_stride, slots_stride, y_row, y_column, BN: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + t * slots_stride)
    if (slot < 0) | (slot >= L):
        return
    r, j, n = tl.arange(0, BR), tl.arange(0, BK), tl.program_id(0) * BN + tl.arange(0, BN)
    # B and y are read before the loop over K, which hides their latency
    b = tl.load(b_ptr + (slot * N + n[:, None]) * R + r[None, :], (n < N)[:, None] & (r < R)[None, :], 0.0)
    y_ptr += t * y_row + n * y_column
    y = tl.load(y_ptr, n < N, 0.0).to(ACC)
    products = tl.zeros([BR, BK], ACC)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_ptr + t * x_stride + k + j, k + j < K, 0.0).to(ACC)
        a = tl.load(a_ptr + (slot * R + r[:, None]) * K + k + j[None, :], (r < R)[:, None] & (k + j < K)[None, :], 0.0)
        products += a.to(ACC) * x[None, :]
    low = tl.where(r < R, tl.sum(products, 1), 0.0)  # an infinity times the padding of A is NaN
    tl.store(y_ptr, y + tl.sum(b.to(ACC) * low[None, :], 1), n < N)


@triton.jit(do_not_specialize=["M", "per_part"])
def tile_kernel(
    x_ptr, a_ptr, b_ptr, slots_ptr, y_ptr, M, N, K, R, per_part, x_stride, slots_stride, y_row, y_column,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1).to(tl.int64)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
    own = tl.load(slots_ptr + m * slots_stride, m < M, -1) == slot
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    row, r, j = m.to(tl.int64)[:, None], tl.arange(0, BR), tl.arange(0, BK)
    low = tl.zeros([BM, BR], ACC)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        real = (k + j < K)[None, :]
        x = tl.load(x_ptr + row * x_stride + k + j[None, :], own[:, None] & real, 0.0)
        a = tl.load(a_ptr + (slot * R + r[:, None]) * K + k + j[None, :], (r < R)[:, None] & real, 0.0)
        low = tl.dot(x, a.T, low, input_precision="ieee", out_dtype=ACC)
    low = tl.where((r < R)[None, :], low, 0.0).to(x_ptr.dtype.element_ty)
    first = tl.program_id(0) * per_part
    for start in tl.range(first, tl.minimum(first + per_part, N), BN, num_stages=STAGES):
        n = start + tl.arange(0, BN)
        b = tl.load(b_ptr + (slot * N + n[:, None]) * R + r[None, :], (n < N)[:, None] & (r < R)[None, :], 0.0)
        at, there = y_ptr + row * y_row + n[None, :] * y_column, own[:, None] & (n < N)[None, :]
        added = tl.dot(low, b.T, input_precision="ieee", out_dtype=ACC)
        tl.store(at, tl.load(at, there, 0.0).to(ACC) + added, there)


def forward(args: Args) -> tuple[()]:
    x, y = args.x, args.y
    if not y.numel() or not args.a.numel():
        return ()
    rows, a, b, sms = as_rows(x), args.a.contiguous(), args.b.contiguous(), num_sms(x.device)
    (M, K), (L, N, R), ACC = rows.shape, b.shape, triton_acc(x.dtype)
    strides, BR = (rows.stride(0), args.slots.stride(0), *y.stride()), max(next_power_of_2(R), 16)
    if M <= FEW_TOKENS:
        BK = min(next_power_of_2(K), VALUES // BR)
        BN = min(max(next_power_of_2(triton.cdiv(N * M, sms)), 64), 2 * VALUES // BR)  # a program per multiprocessor
        stages, warps = (1, 8) if BK >= K else (3, 4)
        token_kernel[(triton.cdiv(N, BN), M)](
            rows, a, b, args.slots, y, L, N, K, R, *strides, BN=BN, BK=BK, BR=BR, STAGES=stages, ACC=ACC,
            num_warps=warps,
        )  # fmt: skip
        return ()
    how = TILE if x.element_size() <= 2 else TILE | {"BM": 16, "BN": 32, "BK": 32, "STAGES": 1}
    tiles, across = triton.cdiv(M, how["BM"]), triton.cdiv(N, how["BN"])
    # neighbours in a prompt have the same adapter, so about tiles + L programs have work
    per_part = triton.cdiv(across, max(1, min(2 * sms // (tiles + L), across))) * how["BN"]
    tile_kernel[(triton.cdiv(N, per_part), L, tiles)](
        rows, a, b, args.slots, y, M, N, K, R, per_part, *strides, BR=BR, ACC=ACC, **how
    )
    return ()
