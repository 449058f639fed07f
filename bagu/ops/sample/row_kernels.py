"""Device functions for one row of logits: loads of groups, the search for a threshold, and the draw.

A row is read in groups of GROUP logits. The groups that can hold a kept token are listed, and a search reads only
those. Logits are compared as fp32. A search bisects the integers that order like floats, and after each pass moves to
the nearest logit that exists: bf16 logits between the smallest kept one and the largest have few different values, so
about 8 passes find the threshold.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(128)


@triton.jit
def load_groups(row, g, ok):
    """The logits of groups g[N, 1]: fp32 [N, GROUP], -inf where there is none.

    `row` is (logits, V, their stride, bits of the visible tokens, words of bits, ids, values, A, the values' first
    group, the row's index). Without replacements ids and values are None, and without a mask bits too.
    """
    x_ptr, V, x_stride, bits_ptr, WORDS, _, values_ptr, A, values_at, s = row
    n = g * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + s * x_stride + n, ok & (n < V), -float("inf")).to(tl.float32)
    if bits_ptr is not None:
        at = g * (GROUP // 32) + tl.arange(0, GROUP // 32)[None, :]
        words = tl.load(bits_ptr + s * WORDS + at, ok & (at < WORDS), 0)
        bits = (words[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
        x = tl.where(tl.reshape(bits, [g.shape[0], GROUP]) != 0, x, -float("inf"))
    if values_ptr is not None:
        a = n - values_at * GROUP
        x = tl.maximum(x, tl.load(values_ptr + s * A + a, ok & (a >= 0) & (a < A), -float("inf")))
    return x


@triton.jit
def token_at(row, n):
    """The token of entry n: n itself in the vocabulary, else the id of a replacement."""
    _, _, _, _, _, ids_ptr, _, A, values_at, s = row
    if ids_ptr is not None:
        a = n - values_at * GROUP
        return tl.where(a >= 0, tl.load(ids_ptr + s * A + a, (a >= 0) & (a < A), 0), n.to(tl.int64))
    else:
        return n.to(tl.int64)


@triton.jit
def first_equal(row, g, top, ok):
    """The first token of group g whose logit is `top`; a large number if there is none or g is not `ok`."""
    n = g * GROUP + tl.arange(0, GROUP)[None, :]
    x = load_groups(row, tl.zeros([1, 1], tl.int32) + g, tl.zeros([1, 1], tl.int1) | ok)
    return tl.min(tl.where((x == top) & ok, token_at(row, n), 1 << 62))


@triton.jit
def ordered(x):
    """An int32 that orders like the fp32 x; -0.0 and 0.0 are both 0."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@triton.jit
def from_ordered(key):
    """The inverse of `ordered`."""
    return tl.where(key < 0, (-key) | -0x80000000, key).to(tl.float32, bitcast=True)


@triton.jit
def middle(low, high):
    """A float in [low, high), in the middle of those between low and high."""
    a, b = ordered(low), ordered(high)
    return from_ordered((a & b) + ((a ^ b) >> 1))  # the floor of the average, without overflow


@triton.jit
def narrow(low, high, enough, over, under):
    """The next (low, high) of a search, after a pass at a pivot in [low, high). `over` is the smallest value above the
    pivot, `under` the largest of the others. `enough`: the pivot meets the condition, as then does every value above.
    """
    none = enough & (under < low)  # no value lies between low and the pivot
    return (
        tl.where(enough & (under >= low), low, over),
        tl.where(none, over, tl.where(enough, under, high)),
    )


@triton.jit
def smallest_top(tops, weights, high, k, limit):
    """The smallest of the groups' largest logits that has fewer than k of them, and less than `limit` of their weight,
    above it."""
    low = tl.min(tops)
    while low < high:
        pivot = middle(low, high)
        above = tops > pivot
        count = tl.sum(above.to(tl.int32))
        mass = tl.sum(tl.where(above, weights, 0.0))
        over = tl.min(tl.where(above, tops, float("inf")))
        under = tl.max(tl.where(above, -float("inf"), tops))
        low, high = narrow(low, high, (count < k) & (mass < limit), over, under)
    return high


@triton.jit
def list_groups(list_ptr, lane, chosen):
    """Write the indices of the chosen groups, in order; return how many there are."""
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(list_ptr + place, lane, chosen)
    tl.debug_barrier()
    return tl.sum(chosen.to(tl.int32))


@triton.jit
def mass_above(row, list_ptr, listed, pivot, base, scale, ROWS: tl.constexpr):
    """Of the listed groups: how many logits are above the pivot, the sum of their weights, the smallest of them, and
    the largest of the others."""
    counts, sums = tl.zeros([ROWS], tl.int32), tl.zeros([ROWS], tl.float32)
    overs, unders = tl.full([ROWS], float("inf"), tl.float32), tl.full([ROWS], -float("inf"), tl.float32)
    for start in range(0, listed, ROWS):
        i = start + tl.arange(0, ROWS)
        ok = i < listed
        g = tl.load(list_ptr + i, ok, 0)
        x = load_groups(row, g[:, None], ok[:, None])
        above = x > pivot
        counts += tl.sum(above.to(tl.int32), axis=1)
        sums += tl.sum(tl.where(above, tl.exp2((x - base) * scale), 0.0), axis=1)
        overs = tl.minimum(overs, tl.min(tl.where(above, x, float("inf")), axis=1))
        unders = tl.maximum(unders, tl.max(tl.where(above, -float("inf"), x), axis=1))
    return tl.sum(counts), tl.sum(sums), tl.min(overs), tl.max(unders)


@triton.jit
def smallest(row, list_ptr, listed, low, high, k, limit, base, scale, ROWS: tl.constexpr):
    """The smallest listed logit from `low` on that has fewer than k logits, and less than `limit` mass, above it. The
    largest logit, `high`, always does."""
    while low < high:
        pivot = middle(low, high)
        count, mass, over, under = mass_above(row, list_ptr, listed, pivot, base, scale, ROWS)
        low, high = narrow(low, high, (count < k) & (mass < limit), over, under)
    return high


@triton.jit
def keep(row, list_ptr, listed, mass_ptr, threshold, base, scale, ROWS: tl.constexpr):
    """Write the mass of the listed groups' logits that are at least the threshold."""
    for start in range(0, listed, ROWS):
        i = start + tl.arange(0, ROWS)
        ok = i < listed
        g = tl.load(list_ptr + i, ok, 0)
        x = load_groups(row, g[:, None], ok[:, None])
        w = tl.where(x >= threshold, tl.exp2((x - base) * scale), 0.0)
        tl.store(mass_ptr + g, tl.sum(w, axis=1), ok)
    tl.debug_barrier()


@triton.jit
def draw(row, masses, lane, u, threshold, base, scale, fallback):
    """The token at which the running sum of weights exceeds u times their sum; `fallback` if the sum is not above 0.
    First the group, by the groups' masses, then the token in it. A group's mass may differ in its last digits from the
    sum of its weights here, so the target is kept below that sum."""
    below_one = 1.0 - 5.9604644775390625e-08  # 1 - 2^-24: u may have been rounded to 1
    sums = tl.cumsum(masses.to(tl.float64), 0)
    total = tl.max(sums)
    target = tl.minimum(u.to(tl.float64), below_one) * total
    g = tl.min(tl.where(sums > target, lane, 1 << 30))
    found = g < (1 << 30)
    before = tl.max(tl.where(lane < g, sums, 0.0))
    x = load_groups(row, tl.zeros([1, 1], tl.int32) + tl.where(found, g, 0), tl.zeros([1, 1], tl.int1) | found)
    w = tl.where(x >= threshold, tl.exp2((x - base) * scale), 0.0).to(tl.float64)
    inside = tl.cumsum(w, 1)
    rest = tl.minimum(target - before, tl.max(inside) * below_one)
    place = tl.arange(0, GROUP)[None, :]
    n = g * GROUP + tl.min(tl.where(inside > rest, place, GROUP))
    token = token_at(row, tl.where(found, n, 0))
    return tl.where(found & (total > 0.0) & (total < float("inf")), token, fallback)
