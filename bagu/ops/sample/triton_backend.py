"""Sampling on Triton: two kernels over the logits as they are, without a sort, a running sum over the vocabulary or a
copy of the logits.

`_reduce_groups` reads the logits once, a tile of 64 groups of 128 per program, and keeps the largest logit and the mass
of each group. `_choose` has a program per row. A greedy row needs only the largest logits. A row without filters finds
its group by the masses and reads that group. A row with filters bounds its threshold by the groups' largest logits
(the k-th largest of these is at most the k-th largest logit), lists the groups that reach the bound, and searches them
(row_kernels.py).

Replaced logits are further groups after the vocabulary's; `_hide_replaced` clears the bit of each replaced token in a
copy of the mask, which hides the original.
Tiles and groups depend on V and A alone, so a row gives the same token in any batch. Arithmetic is fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import as_rows, next_power_of_2
from bagu.ops.kernels.scalars import int64
from bagu.ops.sample.row_kernels import (
    GROUP,
    draw,
    first_equal,
    from_ordered,
    keep,
    list_groups,
    load_groups,
    mass_above,
    ordered,
    smallest,
    smallest_top,
)
from bagu.ops.sample.spec import Args

ROWS = 64  # groups in a tile of `_reduce_groups`
LISTED = 32  # listed groups that `_choose` reads at a time: with 64 it spills registers
TUNABLE = {"forward": {"reduce_warps": (4, 8), "choose_warps": (8, 16)}}


@triton.jit
def _hide_replaced(ids_ptr, values_ptr, allowed_ptr, bits_ptr, used_ptr, A, WORDS, BLOCK: tl.constexpr):
    """Copy the mask of a row without the bits of replaced tokens, and the values, -inf where the entry is unused or its
    token is not allowed."""
    s = int64(tl.program_id(0))
    bits_ptr += s * WORDS
    block = tl.arange(0, BLOCK)
    for start in range(0, WORDS, BLOCK):
        n = start + block
        words = tl.full([BLOCK], -1, tl.int32)
        if allowed_ptr is not None:
            words = tl.load(allowed_ptr + s * WORDS + n, n < WORDS, 0)
        tl.store(bits_ptr + n, words, n < WORDS)
    tl.debug_barrier()
    for start in range(0, A, BLOCK):
        a = start + block
        id = tl.load(ids_ptr + s * A + a, a < A, -1)
        bit = (tl.full([BLOCK], 1, tl.int64) << (id & 31)).to(tl.int32)
        used = id >= 0
        if allowed_ptr is not None:
            used = used & ((tl.load(allowed_ptr + s * WORDS + (id >> 5), used, 0) & bit) != 0)
        tl.atomic_and(bits_ptr + (id >> 5), ~bit, id >= 0)
        value = tl.load(values_ptr + s * A + a, used, -float("inf"))
        tl.store(used_ptr + s * A + a, value, a < A)


@triton.jit
def _reduce_groups(
    x_ptr, V, x_stride, bits_ptr, WORDS, ids_ptr, values_ptr, A, values_at, temperature_ptr, tops_ptr, masses_ptr,
    GROUPS, ROWS: tl.constexpr,
):  # fmt: skip
    """The largest logit of each group, and the sum of weights relative to it. A greedy row needs no weights."""
    s = int64(tl.program_id(1))
    row = (x_ptr, V, x_stride, bits_ptr, WORDS, ids_ptr, values_ptr, A, values_at, s)
    g = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = load_groups(row, g[:, None], tl.full([ROWS, 1], 1, tl.int1))
    top = tl.max(x, axis=1)
    tl.store(tops_ptr + s * GROUPS + g, top)
    temperature = tl.load(temperature_ptr + s)
    if temperature > 0.0:
        base = tl.where(top == -float("inf"), 0.0, top)
        w = tl.exp2((x - base[:, None]) * (1.4426950408889634 / temperature))
        tl.store(masses_ptr + s * GROUPS + g, tl.sum(w, axis=1))


@triton.jit
def _threshold(row, list_ptr, mass_ptr, tops, weights, lane, top, total, k, p, min_p, temperature, base, scale,
               GROUPS, ROWS: tl.constexpr):  # fmt: skip
    """The smallest kept logit of a row with filters. Writes the mass that each group keeps."""
    low = tl.where(min_p > 0.0, top + temperature * tl.log(min_p), -float("inf"))
    bound = low
    if k < row[1]:  # at least k groups, so at least k logits, reach the bound
        bound = tl.maximum(low, tl.where(k <= GROUPS, smallest_top(tops, weights, top, k, float("inf")), low))
    elif (p < 1.0) & (min_p == 0.0):  # the largest logits of groups from the bound on have the mass p
        found = smallest_top(tops, weights, top, 1 << 30, p * total)
        reached = tl.sum(tl.where(tops >= found, weights, 0.0)) >= p * total
        bound = tl.where(reached, found, low)
    listed = list_groups(list_ptr, lane, (tops >= bound) & (lane < GROUPS))  # without filters left, the bound is -inf
    threshold = low
    if k < row[1]:
        threshold = smallest(row, list_ptr, listed, bound, top, k, float("inf"), base, scale, ROWS)
    if p < 1.0:
        mass = total
        if threshold > -float("inf"):  # the mass of the k largest logits, of several equal to the last one not all
            pivot = from_ordered(ordered(threshold) - 1)
            count, mass, _, _ = mass_above(row, list_ptr, listed, pivot, base, scale, ROWS)
            mass -= tl.maximum(count - k, 0).to(tl.float32) * tl.exp2((threshold - base) * scale)
        start = tl.maximum(threshold, bound)
        threshold = smallest(row, list_ptr, listed, start, top, 1 << 30, p * mass, base, scale, ROWS)
    keep(row, list_ptr, listed, mass_ptr, threshold, base, scale, ROWS)
    return threshold


@triton.jit
def _choose(
    x_ptr, V, x_stride, bits_ptr, WORDS, ids_ptr, values_ptr, A, values_at, temperature_ptr, k_ptr, p_ptr, min_p_ptr,
    u_ptr, tops_ptr, masses_ptr, list_ptr, token_ptr, GROUPS, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    s = int64(tl.program_id(0))
    row = (x_ptr, V, x_stride, bits_ptr, WORDS, ids_ptr, values_ptr, A, values_at, s)
    lane = tl.arange(0, LANES)
    tops = tl.load(tops_ptr + s * GROUPS + lane, lane < GROUPS, -float("inf"))
    top = tl.max(tops)
    g = tl.min(tl.where(tops == top, lane, LANES))
    token = first_equal(row, g, top, g < LANES)
    if values_ptr is not None:  # a replaced token may be as large, and come earlier in the vocabulary
        g = tl.min(tl.where((tops == top) & (lane >= values_at), lane, LANES))
        token = tl.minimum(token, first_equal(row, g, top, g < LANES))
    token = tl.where(token < V, token, 0)  # only NaN
    temperature = tl.load(temperature_ptr + s)
    if temperature > 0.0:
        k, p, min_p = tl.load(k_ptr + s), tl.load(p_ptr + s), tl.load(min_p_ptr + s)
        base = tl.where(top == -float("inf"), 0.0, top)
        scale = 1.4426950408889634 / temperature
        weights = tl.exp2((tops - base) * scale)
        masses = tl.load(masses_ptr + s * GROUPS + lane, lane < GROUPS, 0.0) * weights
        threshold = tl.zeros([], tl.float32) - float("inf")
        if (k < V) | (p < 1.0) | (min_p > 0.0):
            threshold = _threshold(row, list_ptr + s * GROUPS, masses_ptr + s * GROUPS, tops, weights, lane, top,
                                   tl.sum(masses), k, p, min_p, temperature, base, scale, GROUPS, ROWS)  # fmt: skip
            masses = tl.load(masses_ptr + s * GROUPS + lane, (lane < GROUPS) & (tops >= threshold), 0.0)
        token = draw(row, masses, lane, tl.load(u_ptr + s), threshold, base, scale, token)
    tl.store(token_ptr + s, token)


def forward(a: Args, *, reduce_warps: int | None = None, choose_warps: int | None = None) -> tuple[torch.Tensor]:
    logits, ids, values = a.logits, a.ids, a.values
    S, V = logits.shape
    token = torch.empty(S, dtype=torch.int64, device=logits.device)
    if not S:
        return (token,)
    rows = as_rows(logits if logits.dtype != torch.float64 else logits.float())
    temperature, top_p, min_p, u = (t.float().contiguous() for t in (a.temperature, a.top_p, a.min_p, a.u))
    bits = None if a.allowed is None else a.allowed.contiguous()
    words, A = triton.cdiv(V, 32) if bits is None else bits.shape[1], 0
    if ids is not None and values is not None:
        A, ids, given = ids.shape[1], ids.contiguous(), values.float().contiguous()
        mask, bits = bits, torch.empty(S, words, dtype=torch.int32, device=logits.device)
        values = torch.empty_like(given)
        _hide_replaced[(S,)](ids, given, mask, bits, values, A, words, BLOCK=1024, num_warps=4)
    tiles, values_at = _tiles(V) + _tiles(A), _tiles(V) * ROWS
    groups = tiles * ROWS
    tops, masses = (torch.empty(S, groups, dtype=torch.float32, device=logits.device) for _ in range(2))
    listed = torch.empty(S, groups, dtype=torch.int32, device=logits.device)
    row = (rows, V, rows.stride(0), bits, words, ids, values, A, values_at)
    _reduce_groups[(tiles, S)](*row, temperature, tops, masses, groups, ROWS=ROWS, num_warps=reduce_warps or 8)
    _choose[(S,)](
        *row, temperature, a.top_k.contiguous(), top_p, min_p, u, tops, masses, listed, token, groups,
        LANES=next_power_of_2(groups), ROWS=LISTED, num_warps=choose_warps or 8,
    )  # fmt: skip
    return (token,)


invariant_forward = forward  # tiles and groups do not depend on the batch


def _tiles(count: int) -> int:
    """Tiles of ROWS groups for this many logits."""
    return triton.cdiv(count, ROWS * GROUP.value)
