"""A linear layer with an adapter for each token on Triton: for few rows, as in a decode.

The A of all slots are further rows of the weight: `product_kernel` multiplies x by both, so A x is neither a launch of
its own nor computed again for each range of outputs. K is divided among programs. `finish_kernel` adds the parts of a
token's outputs in their order, and B (A x) of its slot. On Hopper it is a dependent launch, as in
paged_attention/join.py: its programs start while the product still runs, and read B before they wait for its end.

The layers of a 0.6B model, 32 tokens of 8 adapters of rank 16, in us in a CUDA graph on an H200:

    N x K         cuBLAS without adapters    and lora_add    A in cuBLAS's weight    this    without dependent launch
    4096 x 1024   4.9                        8.4             8.4                     6.5     8.4
    1024 x 2048   5.9                        9.7             8.3                     5.6     7.3
    6144 x 1024   6.1                        10.8            9.7                     8.1     9.8
    1024 x 3072   7.8                        12.1            9.0                     6.4     7.9
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bagu.ops.kernels.launch import as_rows, next_power_of_2, num_sms, starts_early, triton_acc
from bagu.ops.lora_linear.spec import Args

TUNABLE = {"forward": {"parts": (None, 2)}}  # the tests run every combination

TILE = {"BN": 32, "BK": 128, "STAGES": 4, "num_warps": 4}  # the fastest in sum of 18 for the layers above
SHORTEST = 512  # columns of x that a program sums over at least
VALUES = 8192  # of B that a program of `finish_kernel` holds


@triton.jit(do_not_specialize=["M", "per_part"])
def product_kernel(
    x_ptr, w_ptr, a_ptr, slots_ptr, parts_ptr, M, N, K, L, R, per_part, x_stride, slots_stride, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, ACC: tl.constexpr, SKIP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """parts[p, m] = x[m] times the rows of A and then those of w, over a range of K."""
    if EARLY:  # the programs of finish_kernel may start once every program of this kernel has
        gdc_launch_dependents()
    low_tiles = tl.cdiv(L * R, BN)
    low = tl.program_id(0) < low_tiles
    rows_ptr, rows, column = tl.where(low, a_ptr, w_ptr), tl.where(low, L * R, N), tl.where(low, 0, L * R)
    first = (tl.program_id(0) - tl.where(low, 0, low_tiles)) * BN
    m, n, j = tl.program_id(1) * BM + tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, BK)[None, :]
    if SKIP:
        slot = tl.load(slots_ptr + m * slots_stride, m < M, -1)
        used = (slot >= 0) & (slot * R < first + BN) & ((slot + 1) * R > first)
        if low & (tl.max(used.to(tl.int32), 0) == 0):
            return
    # tiles past the end read the last row again
    x_row, row = tl.minimum(m, M - 1).to(tl.int64)[:, None], tl.minimum(n, rows - 1).to(tl.int64)[:, None]
    x_ptr, rows_ptr = x_ptr + x_row * x_stride + j, rows_ptr + row * K + j
    start = tl.program_id(2) * per_part * BK
    total = tl.zeros([BM, BN], ACC)
    for k in tl.range(start, tl.minimum(start + per_part * BK, K), BK, num_stages=STAGES):
        x, w = tl.load(x_ptr + k, k + j < K, 0.0), tl.load(rows_ptr + k, k + j < K, 0.0)
        total = tl.dot(x, w.T, total, input_precision="ieee", out_dtype=ACC)
    at = (tl.program_id(2) * M.to(tl.int64) + m)[:, None] * (N + L * R) + column + n[None, :]
    tl.store(parts_ptr + at, total, (m < M)[:, None] & (n < rows)[None, :])


@triton.jit(do_not_specialize=["M"])
def finish_kernel(
    parts_ptr, b_ptr, bias_ptr, slots_ptr, y_ptr, M, N, L, R, slots_stride, PARTS: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, ACC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[t] = bias + the sum of the parts + b[slot] times A x, of one token and a range of outputs."""
    t = tl.program_id(1).to(tl.int64)
    n, r = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BR)
    # only the parts are written by the kernel before this one, which starts after all others have ended
    slot = tl.load(slots_ptr + t * slots_stride)
    rank = (slot >= 0) & (slot < L) & (r < R)
    b = tl.load(b_ptr + (slot * N + n[:, None]) * R + r[None, :], (n < N)[:, None] & rank[None, :], 0.0)
    y, low = tl.zeros([BN], ACC), tl.zeros([BR], ACC)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(ACC)
    if EARLY:
        gdc_wait()
    for p in tl.static_range(PARTS):
        part = parts_ptr + (p * M + t) * (N + L * R)
        low += tl.load(part + slot * R + r, rank, 0.0)
        y += tl.load(part + L * R + n, n < N, 0.0)
    tl.store(y_ptr + t * N + n, y + tl.sum(b.to(ACC) * low[None, :], 1), n < N)


def _parts(tiles: int, K: int, sms: int) -> int:
    """Into how many parts K is divided. Two are faster than one even if there are enough tiles: 6.6 against 6.9 us for
    132, 8.5 against 9.1 for 196."""
    return max(1, min(max(2, sms // tiles), K // SHORTEST))


def forward(args: Args, *, parts: int | None = None) -> tuple[torch.Tensor]:
    x, slots = args.x, args.slots
    (L, N, R), (M, K) = args.b.shape, x.shape
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return (y,)
    rows, sms = as_rows(x), num_sms(x.device)
    w, a, b = (t.contiguous() for t in (args.w, args.a, args.b))
    ACC, early, wide = triton_acc(x.dtype), starts_early(x.device), x.element_size() > 2  # wide: without tensor cores
    how = TILE | ({"BK": 32, "STAGES": 1} if wide else {})
    BM, BN, BK, BR = 16 if wide else min(max(next_power_of_2(M), 16), 64), how["BN"], how["BK"], next_power_of_2(R)
    tiles = triton.cdiv(L * R, BN) + triton.cdiv(N, BN), triton.cdiv(M, BM)
    per_part = max(1, triton.cdiv(triton.cdiv(K, BK), parts or _parts(tiles[0] * tiles[1], K, sms)))  # blocks of K
    parts = max(1, triton.cdiv(K, per_part * BK))
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    sums = torch.empty(parts, M, N + L * R, dtype=acc, device=x.device)
    product_kernel[(*tiles, parts)](
        rows, w, a, slots, sums, M, N, K, L, R, per_part, rows.stride(0), slots.stride(0), BM=BM, ACC=ACC,
        SKIP=4 * L * R > N,  # with fewer rows of A, reading all is faster than first reading which are used: by 0.5 us
        EARLY=early, **how,
    )  # fmt: skip
    BN = min(max(next_power_of_2(triton.cdiv(N * M, sms)), 64), VALUES // BR)  # a program per multiprocessor
    finish_kernel[(triton.cdiv(N, BN), M)](
        sums, b, None if args.bias is None else args.bias.contiguous(), slots, y, M, N, L, R, slots.stride(0),
        PARTS=parts, BN=BN, BR=BR, ACC=ACC, EARLY=early, num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return (y,)
