"""The choice of blocks with two Triton kernels: the scores of all blocks, then the largest of each row.

`score_kernel` computes a tile of queries against a tile of means, by three products of TF32, which have the precision
of fp32: on an H200 they take a tenth of the time of fp32's own. `select_kernel` has one program per query and key head.
It finds the smallest chosen score by bisection over the bits of the scores, one count over a row in registers for a
bit, until as many are above as are wanted; it takes equal scores from the front, and writes the chosen blocks in their
order by a running count. The scores are stored between the two, for at most `ROOM` numbers at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.choose_blocks.spec import Args, num_chosen
from bagu.ops.contract.signature import accumulator
from bagu.ops.kernels.early import start
from bagu.ops.kernels.launch import next_power_of_2, starts_early, triton_acc
from bagu.ops.paged_attention.paged_kernels import sequence_of

ROOM = 1 << 28  # scores in memory at one time: 1 GiB
TOKENS, BLOCKS = 32, 64  # of a tile of scores
TUNABLE = {"forward": {"pieces": (1, 3)}}


@triton.jit(do_not_specialize=["sequences", "first", "G", "per_group", "size", "columns"])
def score_kernel(
    q_ptr, means_ptr, tables_ptr, cu_ptr, lengths_ptr, scores_ptr, places_ptr, sequences, first, end, G, per_group,
    size, columns, q_stride, q_head_stride, mean_stride, mean_head_stride, table_stride,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DW: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start(EARLY)
    tile, g, at = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) * N
    s = sequence_of(cu_ptr, tile, sequences, M)
    begin, stop = tl.load(cu_ptr + s), tl.load(cu_ptr + s + 1)
    token = begin + (tile - (begin // M + s)) * M + tl.arange(0, M)
    there = (token < stop) & (token >= first) & (token < end)
    place = tl.load(lengths_ptr + s) - stop + token
    if (g == 0) & (at == 0):
        tl.store(places_ptr + 2 * (token - first), place, there)
        tl.store(places_ptr + 2 * (token - first) + 1, s + 0 * place, there)
    last = tl.minimum(tl.max(tl.where(there, place, -1), 0) // size, columns)  # blocks before it are full
    if at >= last:
        return
    j, c = at + tl.arange(0, N), tl.arange(0, DW)
    q = tl.zeros([M, DW], ACC)
    for h in range(per_group):
        row = q_ptr + token.to(tl.int64)[:, None] * q_stride + (g * per_group + h) * q_head_stride
        q += tl.load(row + c[None, :], there[:, None] & (c < D)[None, :], 0.0).to(ACC)
    seen = j < last
    block = tl.load(tables_ptr + s.to(tl.int64) * table_stride + j, seen, 0).to(tl.int64)
    mean = means_ptr + block[:, None] * mean_stride + g * mean_head_stride + c[None, :]
    mean = tl.load(mean, seen[:, None] & (c < D)[None, :], 0.0).to(ACC)
    scores = tl.dot(q, mean.T, input_precision=PRECISION, out_dtype=ACC)
    row = ((token - first).to(tl.int64) * G + g) * WIDTH
    tl.store(scores_ptr + row[:, None] + j[None, :], scores.to(tl.float32), there[:, None] & (j < WIDTH)[None, :])


@triton.jit(do_not_specialize=["G", "size", "top", "near", "dense_below"])
def select_kernel(
    scores_ptr, places_ptr, tables_ptr, out_ptr, lengths_ptr, G, size, top, near, dense_below, table_stride,
    K: tl.constexpr, WIDTH: tl.constexpr, PAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    place, s = tl.load(places_ptr + row // G * 2), tl.load(places_ptr + row // G * 2 + 1)
    own, j = place // size, tl.arange(0, WIDTH)
    local = ((j >= own - near) | (j == 0) | (place < dense_below)) & (j <= own)
    free = (j <= own) & ~local
    score = tl.load(scores_ptr + row * WIDTH + j, free, 0.0)
    score = tl.where(score == 0.0, 0.0, score)  # -0 equals 0
    bits = score.to(tl.int32, bitcast=True)
    # Unsigned numbers of the same order: negative floats have their bits reversed, others get the sign bit; 0: not free
    key = tl.where(bits < 0, ~bits, bits | -2147483648)
    key = tl.where(free, key, 0).to(tl.uint32, bitcast=True)
    wanted = tl.minimum(top, tl.sum(free.to(tl.int32), 0))
    least = tl.full([], 0, tl.uint32)  # the largest number that at least `wanted` keys reach, from its first bits on
    step, above = tl.full([], 1, tl.uint32) << 31, WIDTH + 0 * place
    while (above != wanted) & (step > 0):
        trial = least + step
        count = tl.sum((key >= trial).to(tl.int32), 0)
        if count >= wanted:
            least, above = trial, count
        step = step >> 1
    over = free & (key > least)
    equal = free & (key == least)
    rest = wanted - tl.sum(over.to(tl.int32), 0)
    chosen = local | over | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= rest))
    order = tl.cumsum(chosen.to(tl.int32), 0) - 1
    total = tl.sum(chosen.to(tl.int32), 0)
    KW: tl.constexpr = triton.next_power_of_2(K)
    i, number = tl.arange(0, KW), j
    if PAGES:
        number = tl.load(tables_ptr + s.to(tl.int64) * table_stride + j, chosen, 0)
    tl.store(out_ptr + row * K + i, tl.full([KW], -1, tl.int32), (i >= total) & (i < K))
    tl.store(out_ptr + row * K + order, number, chosen & (order < K))
    tl.store(lengths_ptr + row, (total - 1) * size + place % size + 1)


def forward(a: Args, *, pieces: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens are done in `pieces`, or in as many as `ROOM` needs: the scores of a small one stay in the L2."""
    (T, H, D), (_, G, _), S = a.q.shape, a.means.shape, len(a.context_lens)
    K = num_chosen(a.size, a.top, a.near, a.dense_below, a.max_context)
    out, found = a.q.new_empty(T, G, K, dtype=torch.int32), a.q.new_empty(T, G, dtype=torch.int32)
    if T == 0:
        return out, found
    q, means = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.q, a.means))
    tables, cu, lengths = a.block_tables.contiguous(), a.cu_seqlens.contiguous(), a.context_lens.contiguous()
    columns, acc = -(-a.max_context // a.size), accumulator(q.dtype)
    width = max(next_power_of_2(columns), 16)
    early = starts_early(q.device, rows=T)
    piece = triton.cdiv(T, max(pieces, triton.cdiv(T * G * width, ROOM)))
    for first in range(0, T, piece):
        count = min(piece, T - first)
        scores = q.new_empty(count, G, width, dtype=torch.float32)
        places = q.new_empty(count, 2, dtype=torch.int32)  # of a token, and its sequence
        score_kernel[(T // TOKENS + S, G, triton.cdiv(columns, BLOCKS))](
            q, means, tables, cu, lengths, scores, places, S, first, first + count, G, H // G, a.size, columns,
            q.stride(0), q.stride(1), means.stride(0), means.stride(1), tables.stride(0), D=D, M=TOKENS, N=BLOCKS,
            DW=max(next_power_of_2(D), 16), WIDTH=width, ACC=triton_acc(acc),
            PRECISION="ieee" if acc == torch.float64 else "tf32x3", EARLY=early, launch_pdl=early,
        )  # fmt: skip
        select_kernel[(count * G,)](
            scores, places, tables, out[first:], found[first:], G, a.size, a.top, a.near, a.dense_below,
            tables.stride(0), K=K, WIDTH=width, PAGES=a.pages, EARLY=early,
            num_warps=max(1, min(4, width // 512)), launch_pdl=early,
        )  # fmt: skip
    return out, found


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    """The tile of a score does not depend on the batch, and neither does its sum."""
    return forward(a)
