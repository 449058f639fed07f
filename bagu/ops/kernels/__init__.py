"""Triton code that several ops share: 64-bit indices, rows of any length, a weight gradient's sum over programs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.launch import num_sms, triton_acc

__all__ = [
    "apart",
    "column_sum",
    "column_sums",
    "int64",
    "read_apart",
    "reciprocal",
    "rsqrt",
    "shifted",
    "shifted_copies",
    "take_apart",
]


@triton.jit
def int64(i):
    """A loop counter as a 64-bit offset; in the interpreter it is a Python int and has no `.to`."""
    return tl.zeros([], tl.int64) + i


@triton.jit
def reciprocal(N, ACC: tl.constexpr):
    """1 / N in ACC, rounded to nearest. Taken before the row arrives, it keeps the slow division off the row's path."""
    n = tl.zeros([], ACC) + N
    if n.dtype == tl.float32:
        return tl.div_rn(1.0, n)
    else:
        return 1.0 / n


@triton.jit
def rsqrt(x):
    """1 / sqrt(x) within an ulp. The approximate one is 2 off, the same way in a whole row; a Newton step mends that.

    A correctly rounded division here cost LayerNorm a tenth of its speed on an H200: every row waits for it.
    """
    if x.dtype == tl.float32:
        r = tl.rsqrt(x)
        return tl.where((x > 0.0) & (x < float("inf")), r + r * (0.5 - 0.5 * (x * r) * r), r)
    else:
        return 1.0 / tl.sqrt(x)


@triton.jit
def apart(row, N, BLOCK_N: tl.constexpr, TAIL: tl.constexpr, VEC: tl.constexpr):
    """Which columns of row `row` (and of every VEC-th one from it) are its block, and which TAIL others are apart.

    With VEC the rows are contiguous and begin anywhere: the block is the row's body, a multiple of VEC columns on a
    16-byte boundary, and apart are its two ends, up to VEC columns each. So the body moves 128 bits at a time whatever
    N is; without this a row of 4,095 bf16 moves 16 (0.70 of copy bandwidth on an H200, not 0.92). Without VEC apart is
    what is past the block. Returns (head, body, at, real): the block is [head, head + body); apart are `at` where real.
    """
    e = tl.arange(0, TAIL)[None, :]
    if VEC:
        head = ((VEC - row * N % VEC) % VEC).to(tl.int32)
        head = tl.minimum(head, N)
        body = tl.multiple_of((tl.maximum(N - head, 1) - 1) // VEC * VEC, VEC)  # 4,096 of 4,104 too: the block is half
        before = e < VEC
        at = tl.where(before, e, head + body + e - VEC)
        return head, body, at, tl.where(before, e < head, at < N)
    else:
        return 0, BLOCK_N, BLOCK_N + e, BLOCK_N + e < N


@triton.jit
def read_apart(x_ptr, m, M, stride, at, real):
    """What is apart in row m, as it is stored.

    Of an odd row a loop asks for it one row ahead: two bytes are too few for the copies to shared memory that bring the
    body, and a row that waits for its ends waits for memory (backward at N = 8,193: 0.64 of copy bandwidth, not 0.83).
    """
    return tl.load(x_ptr + m * stride + at, real & (m < M), 0.0, eviction_policy="evict_last")


@triton.jit
def take_apart(x_ptr, held, tile, m, M, N, stride, at, real, VEC: tl.constexpr, ACC: tl.constexpr):
    """What is apart in row m, and what a loop holds for its next round: of odd rows the next row's, asked for now."""
    if VEC:
        return held.to(ACC), read_apart(x_ptr, tile + tl.num_programs(0), M, N, at, real)
    else:
        return read_apart(x_ptr, m, M, stride, at, real).to(ACC), held


@triton.jit
def _shift(w_ptr, b_ptr, shifted_w_ptr, shifted_b_ptr, N, step, BLOCK: tl.constexpr):
    k, n = int64(tl.program_id(1)), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(shifted_w_ptr + k * step + n, tl.load(w_ptr + (n + k) % N))
    if b_ptr is not None:
        tl.store(shifted_b_ptr + k * step + n, tl.load(b_ptr + (n + k) % N))


def shifted_copies(
    w: torch.Tensor, b: torch.Tensor | None, copies: int, length: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Copies of w and of b that begin one element later each and go round for `length`; and their stride."""
    parts = triton.cdiv(length, 1024)
    gains, biases = w.new_empty(copies, 1024 * parts), None if b is None else b.new_empty(copies, 1024 * parts)
    _shift[(parts, copies)](w, b, gains, biases, len(w), 1024 * parts, BLOCK=1024, num_warps=4)
    return gains, biases, 1024 * parts


def shifted(
    w: torch.Tensor, b: torch.Tensor | None, vec: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """w and b for rows whose bodies begin at `head`, and the step with which w[head + n] is at head * step + n.

    That is 1, or, for many odd rows, the stride of `vec` shifted copies: a body's gains are then aligned as it is.
    Read number by number they cost as much as x itself (RMSNorm at 12,289: 0.45 of copy bandwidth).
    """
    return shifted_copies(w, b, vec, len(w)) if vec and rows >= 2 * num_sms(w.device) else (w, b, 1)


@triton.jit(do_not_specialize=["P"])
def _column_sum(p_ptr, y_ptr, z_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, ACC: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = int64(tl.program_id(1))
    total = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, P, BLOCK_P):
        p = start + tl.arange(0, BLOCK_P)
        real = (p < P)[:, None] & (n < N)[None, :]
        total += tl.load(p_ptr + (k * P + p[:, None]) * N + n[None, :], real, 0.0)
    out = y_ptr
    if k > 0:
        out = z_ptr
    tl.store(out + n, tl.sum(total, axis=0), n < N)


def column_sum(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partial[P, N] summed over P in its own dtype (fp32 or fp64), rounded once to `dtype`. Deterministic."""
    y = torch.empty(partial.shape[-1], dtype=dtype, device=partial.device)
    _launch(partial, y, y, 1)
    return y


def column_sums(partial: torch.Tensor, first: torch.dtype, second: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of partial[2, P, N] as `column_sum` would; in one launch where they have one dtype."""
    if first != second:
        return column_sum(partial[0], first), column_sum(partial[1], second)
    y, z = (torch.empty(partial.shape[-1], dtype=first, device=partial.device) for _ in range(2))
    _launch(partial, y, z, 2)
    return y, z


def _launch(partial: torch.Tensor, y: torch.Tensor, z: torch.Tensor, outputs: int) -> None:
    """264 programs' sums of 4,096 features are 4 MB: to ask for them at once, a program has few columns, many rows."""
    P, N = partial.shape[-2:]
    _column_sum[(triton.cdiv(N, 32), outputs)](
        partial, y, z, P, N, BLOCK_P=128, BLOCK_N=32, ACC=triton_acc(partial.dtype), num_warps=8
    )
