"""int8 attention on Hopper, in Gluon: one warp loads keys and values; two groups of four warps take 64 queries each.

For each block of keys a group starts two products, of its queries with these keys and of the last block's weights with
their values, and computes the softmax of the new scores while the second one runs. The groups take turns to start
their products, so that one computes a softmax while the tensor cores work for the other. Triton's compiler waits for
each product, and is slower than `attention` (docs/ops.md). The queries are in registers: from shared memory they would
be read again for each block of keys.

A block has as many keys as queries, and the last block is computed first. It alone needs a mask, the causal one or the
end of the segment, so that one loop is enough for all others. With a second loop for the masked block at the end, 16k
causal tokens of 16 heads took 1.80 ms on an H200 instead of 1.62.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bagu.ops.attention.score_kernels import keys_of, seen, work
from bagu.ops.int8_attention.attend_kernel import above_zero
from bagu.ops.kernels.quantize import inverse_of, magnitude, quantized, scale_of


@gluon.jit
def _load(k_ptr, v_ptr, ks, vs, k_full, k_free, v_full, v_free, blocks, length, k_stride, v_stride):
    """Copy each block of keys and of values, the last one first, into the next stage that is free.

    This warp makes the TMA descriptors, which takes microseconds, while the others load and round the queries.
    """
    STAGES: gl.constexpr = ks.shape[0]
    N: gl.constexpr = ks.shape[1]
    D: gl.constexpr = ks.shape[2]
    k_rows = tma.make_tensor_descriptor(k_ptr, [length, D], [k_stride, 1], [N, D], ks.layout)
    v_rows = tma.make_tensor_descriptor(v_ptr, [length, D], [v_stride, 1], [N, D], vs.layout)
    for n in range(blocks):
        at = (blocks - 1 - n) * N
        stage, phase = n % STAGES, n // STAGES & 1 ^ 1
        mbarrier.wait(k_free.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k_rows.block_type.nbytes)
        tma.async_copy_global_to_shared(k_rows, [at, 0], k_full.index(stage), ks.index(stage))
        mbarrier.wait(v_free.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v_rows.block_type.nbytes)
        tma.async_copy_global_to_shared(v_rows, [at, 0], v_full.index(stage), vs.index(stage))


@gluon.jit
def _start_scores(q, ks, k_full, n, SCORES: gl.constexpr):
    """Start the product of the queries with block n of the keys, in the order in which they are loaded."""
    M: gl.constexpr = q.shape[0]
    STAGES: gl.constexpr = ks.shape[0]
    N: gl.constexpr = ks.shape[1]
    mbarrier.wait(k_full.index(n % STAGES), n // STAGES & 1)
    zeros = gl.zeros([M, N], gl.int32, SCORES)
    return warpgroup_mma(q, ks.index(n % STAGES).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _wait_for_turn(turns, n, GROUP: gl.constexpr):
    """Wait until the other group has started its products of block n; the first group: of block n - 1."""
    mbarrier.wait(turns.index(GROUP), (n & 1) ^ 1 if GROUP == 0 else n & 1)


@gluon.jit
def _hide(s, at, i, length, CAUSAL: gl.constexpr, SCORES: gl.constexpr):
    """-inf for the keys, from `at` on, that a query does not attend to."""
    j = at + gl.arange(0, s.shape[1], gl.SliceLayout(0, SCORES))
    return gl.where(seen(i[:, None], j[None, :], length, 0, CAUSAL, False), s, float("-inf"))


@gluon.jit
def _scale_of_keys(k_scales, block, N: gl.constexpr, KEYS: gl.constexpr):
    """The scale of a block of N keys, or of the first one if `block` is negative."""
    return gl.load(k_scales + gl.maximum(block, 0) * N // KEYS * KEYS)


@gluon.jit
def _softmax(s, step, top, total):
    """The weights of a block; the factor of everything summed before; the new maximum and sum."""
    higher = gl.maximum(top, gl.max(s, 1) * step)
    kept = gl.exp2(top - higher)
    p = gl.exp2(s * step[:, None] - higher[:, None])
    return p, kept, higher, total * kept + gl.sum(p, 1)


@gluon.jit
def _after(total, GROUP: gl.constexpr):
    """total, by a barrier of the group that depends on it, so that the softmax is computed before what follows.

    Otherwise the assembler moves the wait for a product up to the start of the softmax, and nothing runs beside it.
    A sum is not negative, so the barrier is for 128 threads.
    """
    BARRIER: gl.constexpr = (
        "{ .reg .pred p; .reg .f32 t; .reg .u32 n; min.f32 t, $2, $3; setp.lt.f32 p, t, 0f00000000; "
        "selp.u32 n, 256, 128, p; bar.sync " + ("12" if GROUP == 0 else "13") + ", n; mov.b32 $0, $2; mov.b32 $1, $3; }"
    )
    return gl.inline_asm_elementwise(BARRIER, "=f,=f,f,f", [total], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def _next_block(
    n, q, p, mixed, top, total, ks, vs, k_full, k_free, v_full, v_free, turns, q_scale, k_scale,
    SCORES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Add the values of block n - 1 with their weights p, and compute the weights of block n meanwhile. Block 0 is the
    one that is computed first.

    There is no branch between the start of a product and its end: the assembler would wait for the product there.
    """
    STAGES: gl.constexpr = ks.shape[0]
    MIXED: gl.constexpr = mixed.type.layout
    last = (n - 1) % STAGES
    step = above_zero(q_scale * k_scale)
    _wait_for_turn(turns, n, GROUP)
    s = _start_scores(q, ks, k_full, n, SCORES)
    mbarrier.wait(v_full.index(last), (n - 1) // STAGES & 1)
    mixed = warpgroup_mma(p, vs.index(last), mixed, is_async=True)
    mbarrier.arrive(turns.index(1 - GROUP))
    s = warpgroup_mma_wait(1, deps=[s]).to(gl.float32)
    mbarrier.arrive(k_free.index(n % STAGES))
    weights, kept, top, total = _softmax(s, step, top, total)
    mixed, total = warpgroup_mma_wait(0, deps=[mixed, _after(total, GROUP)])
    mbarrier.arrive(v_free.index(last))
    mixed = mixed * gl.convert_layout(kept, gl.SliceLayout(1, MIXED))[:, None]
    return gl.convert_layout(weights.to(vs.dtype), gl.DotOperandLayout(0, MIXED, 2)), mixed, top, total


@gluon.jit
def _attend(
    q_ptr, k_scales, out_ptr, qs, ks, vs, k_full, k_free, v_full, v_free, turns, first, length, blocks, scale,
    q_stride, out_stride, KEYS: gl.constexpr, CAUSAL: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Attend with the 64 queries from `first` on."""
    M: gl.constexpr = qs.shape[0]
    D: gl.constexpr = qs.shape[1]
    STAGES: gl.constexpr = ks.shape[0]
    N: gl.constexpr = ks.shape[1]
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    QUERY: gl.constexpr = gl.SliceLayout(1, SCORES)

    k_scale = _scale_of_keys(k_scales, blocks - 1, N, KEYS)
    row = first + gl.arange(0, M, gl.SliceLayout(1, ROWS))
    d = gl.arange(0, D, gl.SliceLayout(0, ROWS))
    there = (row < length)[:, None]
    q = gl.load(q_ptr + row.to(gl.int64)[:, None] * q_stride + d[None, :], there, 0.0)
    q_scale = scale_of(gl.max(magnitude(q, gl.float32), 1), 127.0, gl.float32)
    qs.store(quantized(q, inverse_of(q_scale)[:, None], gl.int8, gl.float32))
    q_scale = gl.convert_layout(q_scale, QUERY) * scale
    q = qs.load(gl.DotOperandLayout(0, SCORES, 4))

    i = first + gl.arange(0, M, QUERY)
    top = gl.full([M], float("-inf"), gl.float32, QUERY)
    total = gl.zeros([M], gl.float32, QUERY)
    mixed = gl.zeros([M, D], gl.float32, MIXED)
    step = above_zero(q_scale * k_scale)
    k_scale = _scale_of_keys(k_scales, blocks - 2, N, KEYS)
    _wait_for_turn(turns, 0, GROUP)
    s = _start_scores(q, ks, k_full, 0, SCORES)
    mbarrier.arrive(turns.index(1 - GROUP))
    s = warpgroup_mma_wait(0, deps=[s]).to(gl.float32)
    mbarrier.arrive(k_free.index(0))
    s = _hide(s, (blocks - 1) * N, i, length, CAUSAL, SCORES)
    p, _, top, total = _softmax(s, step, top, total)
    p = gl.convert_layout(p.to(vs.dtype), gl.DotOperandLayout(0, MIXED, 2))
    for n in range(1, blocks):
        next_scale = _scale_of_keys(k_scales, blocks - 2 - n, N, KEYS)
        p, mixed, top, total = _next_block(
            n, q, p, mixed, top, total, ks, vs, k_full, k_free, v_full, v_free, turns, q_scale, k_scale, SCORES, GROUP
        )
        k_scale = next_scale
    last = (blocks - 1) % STAGES
    mbarrier.wait(v_full.index(last), (blocks - 1) // STAGES & 1)
    mixed = warpgroup_mma(p, vs.index(last), mixed)
    mean = mixed / gl.convert_layout(total, gl.SliceLayout(1, MIXED))[:, None]
    mean = gl.convert_layout(mean.to(out_ptr.dtype.element_ty), ROWS)
    gl.store(out_ptr + row.to(gl.int64)[:, None] * out_stride + d[None, :], mean, there)


@gluon.jit(do_not_specialize=["T", "H", "per_group"])
def hopper_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, out_ptr, tiles_ptr, T, H, per_group, scale, q_stride, k_stride, v_stride,
    q_head_stride, k_head_stride, v_head_stride, D: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """GROUP keys share a scale."""
    gl.static_assert(M == N, "only the last block of keys is masked")
    h, begin, length, block = work(tiles_ptr)
    if length == 0:
        return
    g = h // per_group
    HALF: gl.constexpr = M // 2
    BYTES: gl.constexpr = gl.NVMMASharedLayout(D, 8)
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q_first, out_first = q_ptr + begin * q_stride + h * q_head_stride, out_ptr + (begin * H + h) * D
    k_first, v_first = k_ptr + begin * k_stride + g * k_head_stride, v_ptr + begin * v_stride + g * v_head_stride
    k_scales = k_scale_ptr + g * T + begin
    _, _, end = keys_of(block, length, 0, M, N, CAUSAL, False)
    blocks = gl.cdiv(end, N)
    qs_0 = gl.allocate_shared_memory(gl.int8, [HALF, D], BYTES)
    qs_1 = gl.allocate_shared_memory(gl.int8, [HALF, D], BYTES)
    ks = gl.allocate_shared_memory(gl.int8, [STAGES, N, D], BYTES)
    vs = gl.allocate_shared_memory(v_ptr.dtype.element_ty, [STAGES, N, D], WORDS)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)  # both groups have read it
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=2)
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (q_first, k_scales, out_first, qs_0, ks, vs, k_full, k_free, v_full, v_free, turns, block * M,
                       length, blocks, scale, q_stride, H * D, GROUP, CAUSAL, 0)),
            (_attend, (q_first, k_scales, out_first, qs_1, ks, vs, k_full, k_free, v_full, v_free, turns,
                       block * M + HALF, length, blocks, scale, q_stride, H * D, GROUP, CAUSAL, 1)),
            (_load, (k_first, v_first, ks, vs, k_full, k_free, v_full, v_free, blocks, length, k_stride, v_stride)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
