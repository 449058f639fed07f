"""Convolution on Hopper, in Gluon: one warp loads, two groups of four warps multiply half of a tile's pixels each.

A tile has B0 x B1 x B2 output pixels (images x rows x columns) and N output channels. For each tap and block of
channels, TMA reads the box of x that is shifted by the tap, with zeros outside of the image: no pixel is copied to a
patch matrix, and the loop is that of a plain product. In Triton a box reaches the product through registers, which
halves the speed: 409 TFLOP/s instead of 606 at 256 channels of 28 x 28 pixels (H200).
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

from bagu.ops.kernels.gemm import activated


@gluon.jit
def _tile_of(tile, P, Q, O, B0: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr, N: gl.constexpr):
    """The first image, row, column and output channel of a tile. Tiles of the same pixels follow each other."""
    deep, down, across = gl.cdiv(O, N), gl.cdiv(P, B1), gl.cdiv(Q, B2)
    box = tile // deep
    return box // (across * down) * B0, box // across % down * B1, box % across * B2, tile % deep * N


@gluon.jit
def _load(
    x_boxes, w_rows, xs, ws, full, free, tiles, C, P, Q, O, pad_h, pad_w, dilation_h, dilation_w, R: gl.constexpr,
    S: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the operands of every step of this program's tiles, each into the next stage that is free."""
    BC: gl.constexpr = x_boxes.block_shape[3]
    blocks = C // BC
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        b, p, q, o = _tile_of(
            tile, P, Q, O, x_boxes.block_shape[0], x_boxes.block_shape[1], x_boxes.block_shape[2], w_rows.block_shape[0]
        )
        for i in range(R * S * blocks):
            stage, tap = step % STAGES, i // blocks
            mbarrier.wait(free.index(stage), step // STAGES & 1 ^ 1)
            mbarrier.expect(full.index(stage), x_boxes.block_type.nbytes + w_rows.block_type.nbytes)
            row, column = p + tap // S * dilation_h - pad_h, q + tap % S * dilation_w - pad_w
            tma.async_copy_global_to_shared(
                x_boxes, [b, row, column, i % blocks * BC], full.index(stage), xs.index(stage)
            )
            tma.async_copy_global_to_shared(w_rows, [o, i * BC], full.index(stage), ws.index(stage))
            step += 1


@gluon.jit
def _multiply(
    y_boxes, xs, ws, out, full, free, bias_ptr, x_scale_ptr, w_scale_ptr, tiles, steps, P, Q, O, B0: gl.constexpr,
    B1: gl.constexpr, B2: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr, SCALED: gl.constexpr,
    BIASED: gl.constexpr, ACTIVATION: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Multiply and store one half of the pixels of this program's tiles."""
    N: gl.constexpr = ws.shape[1]
    BC: gl.constexpr = ws.shape[2]
    PIXELS: gl.constexpr = B0 * B1 * B2
    ROWS: gl.constexpr = PIXELS // 2
    DEPTH: gl.constexpr = 256 // xs.dtype.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, DEPTH])
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        total = gl.zeros([ROWS, N], SUMS, LAYOUT)
        for i in range(steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            x = xs.index(stage).reshape([PIXELS, BC]).slice(HALF * ROWS, ROWS, 0)
            total = warpgroup_mma(x, ws.index(stage).permute((1, 0)), total, is_async=True)
            total = warpgroup_mma_wait(1, deps=[total])  # the product of the step before is complete
            mbarrier.arrive(free.index((step + STAGES - 1) % STAGES), pred=i > 0)
            step += 1
        total = warpgroup_mma_wait(0, deps=[total])
        mbarrier.arrive(free.index((step + STAGES - 1) % STAGES))
        b, p, q, o = _tile_of(tile, P, Q, O, B0, B1, B2, N)
        column = o + gl.arange(0, N, gl.SliceLayout(0, LAYOUT))
        z = total.to(gl.float32)
        if SCALED:
            w_scale = gl.load(w_scale_ptr + column, column < O, 0.0).to(gl.float32)
            z = z * gl.load(x_scale_ptr).to(gl.float32) * w_scale[None, :]
        if BIASED:
            z += gl.load(bias_ptr + column, column < O, 0.0).to(gl.float32)[None, :]
        y = activated(z, ACTIVATION).to(out.dtype)
        tma.store_wait(0)  # of the tile before
        out.reshape([ROWS, N]).store(y)
        fence_async_shared()
        if B0 > 1:
            tma.async_copy_shared_to_global(y_boxes, [b + HALF * (B0 // 2), p, q, o], out)
        else:
            tma.async_copy_shared_to_global(y_boxes, [b, p + HALF * (B1 // 2), q, o], out)
    tma.store_wait(0)


@gluon.jit
def hopper_kernel(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, y_ptr, B, H, W, C, O, P, Q, tiles, pad_h, pad_w, dilation_h,
    dilation_w, R: gl.constexpr, S: gl.constexpr, B0: gl.constexpr, B1: gl.constexpr, B2: gl.constexpr,
    N: gl.constexpr, BC: gl.constexpr, STAGES: gl.constexpr, SUMS: gl.constexpr, SCALED: gl.constexpr,
    BIASED: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """bias_ptr, x_scale_ptr and w_scale_ptr are read only if BIASED and SCALED: a partition takes no None."""
    bits: gl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth
    BOXES: gl.constexpr = gl.NVMMASharedLayout(128, bits, rank=4)
    ROWS: gl.constexpr = gl.NVMMASharedLayout(128, bits, rank=2)
    OUT: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=4)
    H0: gl.constexpr = B0 // 2 if B0 > 1 else 1  # half a box: of its images, or of its rows
    H1: gl.constexpr = B1 if B0 > 1 else B1 // 2
    depth = R * S * C
    x_boxes = tma.make_tensor_descriptor(x_ptr, [B, H, W, C], [H * W * C, W * C, C, 1], [B0, B1, B2, BC], BOXES)
    w_rows = tma.make_tensor_descriptor(w_ptr, [O, depth], [depth, 1], [N, BC], ROWS)
    y_boxes = tma.make_tensor_descriptor(y_ptr, [B, P, Q, O], [P * Q * O, Q * O, O, 1], [H0, H1, B2, N], OUT)
    xs = gl.allocate_shared_memory(x_boxes.dtype, [STAGES, B0, B1, B2, BC], BOXES)
    ws = gl.allocate_shared_memory(w_rows.dtype, [STAGES, N, BC], ROWS)
    out_0 = gl.allocate_shared_memory(y_boxes.dtype, y_boxes.block_shape, OUT)
    out_1 = gl.allocate_shared_memory(y_boxes.dtype, y_boxes.block_shape, OUT)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)  # both halves have read it
    fence_async_shared()
    steps = R * S * (C // BC)
    gl.warp_specialize(
        [
            (_multiply, (y_boxes, xs, ws, out_0, full, free, bias_ptr, x_scale_ptr, w_scale_ptr, tiles, steps, P, Q, O,
                         B0, B1, B2, STAGES, SUMS, SCALED, BIASED, ACTIVATION, 0)),
            (_multiply, (y_boxes, xs, ws, out_1, full, free, bias_ptr, x_scale_ptr, w_scale_ptr, tiles, steps, P, Q, O,
                         B0, B1, B2, STAGES, SUMS, SCALED, BIASED, ACTIVATION, 1)),
            (_load, (x_boxes, w_rows, xs, ws, full, free, tiles, C, P, Q, O, pad_h, pad_w, dilation_h, dilation_w, R, S,
                     STAGES)),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
