"""MLA attention on Hopper, in Gluon: 64 heads of one token over a range of its sequence's latents.

Triton's compiler gives both warpgroups all of q . k, because the scores are the operand of another product: they
compute it twice, and that takes longer than all the rest. In Gluon the kernel states layouts and waits itself. Here
each warpgroup computes the scores of half the keys of a tile, and then half the features of the result.

Shared memory holds the queries, two tiles of keys and the weights: 225 of 227 KiB. While one tile is multiplied, the
next is copied. A tile is both key and value, so the copy into its place starts when the product with it is complete.
Keys past the end are read as the last key, and their weights are 0. Products of the scores wait for shared memory (an
instruction of 64 x 32 scores reads more than it multiplies), so a part of the queries is in registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.jit
def _sequence_of(cu_ptr, token, sequences):
    """The sequence of a token: the last one that begins at or before it."""
    low, high = 0, sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if gl.load(cu_ptr + middle) <= token:
            low = middle
        else:
            high = middle - 1
    return low


@gluon.jit
def _copy_rows(latents, rotated, row_ptr, E: gl.constexpr, R: gl.constexpr, COPY: gl.constexpr):
    """Start to copy rows of E and then R features, which begin at `row_ptr`[:, None]."""
    e, o = gl.arange(0, E, gl.SliceLayout(0, COPY)), gl.arange(0, R, gl.SliceLayout(0, COPY))
    async_copy.async_copy_global_to_shared(latents, row_ptr + e[None, :])
    async_copy.async_copy_global_to_shared(rotated, row_ptr + (E + o)[None, :])
    async_copy.commit_group()


@gluon.jit
def _row_of(cache_ptr, page, j, block_stride, row_stride, B: gl.constexpr, LARGE: gl.constexpr):
    """The address of position j, which is in block `page`, as a column."""
    if LARGE:
        page = page.to(gl.int64)
    return cache_ptr + (page * block_stride + j % B * row_stride)[:, None]


@gluon.jit
def _scores(q_0, q_rotated, q, latents, rotated, x, R: gl.constexpr, E: gl.constexpr):
    """Start q . k, of which `q_rotated` and the first R features `q_0` are in registers."""
    x = warpgroup_mma(q_rotated, rotated.permute((1, 0)), x, use_acc=False, is_async=True)
    x = warpgroup_mma(q_0, latents.slice(0, R, 1).permute((1, 0)), x, is_async=True)
    for i in gl.static_range(3):  # features R, 2 R and 4 R on: a slice is a power of two
        x = warpgroup_mma(
            q.slice(R << i, R << i, 1), latents.slice(R << i, R << i, 1).permute((1, 0)), x, is_async=True
        )
    return x


@gluon.jit(do_not_specialize=["sequences", "T", "H", "groups"])
def hopper_kernel(
    q_ptr, cache_ptr, tables_ptr, cu_ptr, lengths_ptr, out_ptr, lse_ptr, sequences, T, H, groups, scale, table_stride,
    q_stride, q_head_stride, block_stride, row_stride, B: gl.constexpr, E: gl.constexpr, R: gl.constexpr,
    M: gl.constexpr, N: gl.constexpr, SPLIT: gl.constexpr, LARGE: gl.constexpr,
):  # fmt: skip
    gl.static_assert(E == 8 * R, "_scores divides the features")
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, N // 2, 16])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, E // 2, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    KEY: gl.constexpr = gl.SliceLayout(1, COPY)
    HEAD: gl.constexpr = gl.SliceLayout(1, SCORES)
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    token, group, split = T - 1 - gl.program_id(0) // groups, gl.program_id(0) % groups, gl.program_id(1)
    s = _sequence_of(cu_ptr, token, sequences)
    first, end = split * SPLIT, gl.load(lengths_ptr + s) - (gl.load(cu_ptr + s + 1) - 1 - token)
    h = group * M + gl.arange(0, M, HEAD)
    into = (split * T + token).to(gl.int64) * H  # [splits, T, H]
    if SPLIT > 0:
        end = gl.minimum(end, first + SPLIT)
    if first >= end:  # no key: join_kernel reads no values of this range
        gl.store(lse_ptr + into + h, gl.full([M], float("-inf"), gl.float32, HEAD), h < H)
        return

    q, q_rotated = gl.allocate_shared_memory(dtype, [M, E], SHARED), gl.allocate_shared_memory(dtype, [M, R], SHARED)
    latents = gl.allocate_shared_memory(dtype, [2, N, E], SHARED)
    rotated = gl.allocate_shared_memory(dtype, [2, N, R], SHARED)
    weights = gl.allocate_shared_memory(dtype, [M, N], SHARED)
    peaks = gl.allocate_shared_memory(gl.float32, [M, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    head = gl.minimum(group * M + gl.arange(0, M, KEY), H - 1)
    _copy_rows(q, q_rotated, q_ptr + (token.to(gl.int64) * q_stride + head * q_head_stride)[:, None], E, R, COPY)
    n, last = gl.arange(0, N, KEY), end - 1
    table_ptr = tables_ptr + s.to(gl.int64) * table_stride
    j = gl.minimum(first + n, last)
    row_ptr = _row_of(cache_ptr, gl.load(table_ptr + j // B), j, block_stride, row_stride, B, LARGE)
    _copy_rows(latents.index(0), rotated.index(0), row_ptr, E, R, COPY)
    j = gl.minimum(first + N + n, last)
    page = gl.load(table_ptr + j // B)
    async_copy.wait_group(1)
    q_rotated, q_0 = q_rotated.load(OPERAND), q.slice(0, R, 1).load(OPERAND)

    top = gl.full([M], float("-inf"), gl.float32, HEAD)
    sums = gl.zeros([M, N], gl.float32, SCORES)  # summed along the keys at the end: a sum per tile needs a barrier
    mixed = warpgroup_mma_init(gl.zeros([M, E], gl.float32, MIXED))
    column = gl.arange(0, N, gl.SliceLayout(0, SCORES))
    now = 0
    for at in range(first, end, N):
        async_copy.wait_group(0)
        fence_async_shared()
        mixed = warpgroup_mma_wait(0, deps=[mixed])
        x = gl.zeros([M, N], gl.float32, SCORES)
        x = _scores(q_0, q_rotated, q, latents.index(now), rotated.index(now), x, R, E)
        row_ptr = _row_of(cache_ptr, page, j, block_stride, row_stride, B, LARGE)
        _copy_rows(latents.index(now ^ 1), rotated.index(now ^ 1), row_ptr, E, R, COPY)
        j = gl.minimum(at + 2 * N + n, last)
        page = gl.load(table_ptr + j // B)
        x = warpgroup_mma_wait(0, deps=[x]) * scale
        if at + N > end:
            x = gl.where((at + column < end)[None, :], x, float("-inf"))
        peaks.store(gl.max(x.reshape([M, 2, N // 2]), 2))  # of each warpgroup's keys; gl.max(x, 1) has two barriers
        higher = gl.maximum(top, gl.max(peaks.load(SCORES), 1))
        kept, p = gl.exp2(top - higher), gl.exp2(x - higher[:, None])
        weights.store(p.to(dtype))
        top, sums = higher, sums * kept[:, None] + p
        mixed = mixed * gl.convert_layout(kept, gl.SliceLayout(1, MIXED))[:, None]
        fence_async_shared()
        mixed = warpgroup_mma(weights, latents.index(now), mixed, is_async=True)
        now = now ^ 1

    mixed = warpgroup_mma_wait(0, deps=[mixed])
    async_copy.wait_group(0)
    total = gl.sum(sums, 1)
    unit: gl.constexpr = 1.0 if SPLIT > 0 else LN2  # join_kernel takes logs of base 2
    gl.store(lse_ptr + into + h, (top + gl.log2(total)) * unit, h < H)
    mean = mixed / gl.convert_layout(total, gl.SliceLayout(1, MIXED))[:, None]
    h, e = group * M + gl.arange(0, M, gl.SliceLayout(1, MIXED)), gl.arange(0, E, gl.SliceLayout(0, MIXED))
    gl.store(out_ptr + ((into + h) * E)[:, None] + e[None, :], mean.to(out_ptr.dtype.element_ty), (h < H)[:, None])
