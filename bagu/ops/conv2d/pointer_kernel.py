"""Convolution as an implicit matrix product: y[o, pixel] is the sum over taps and channels of w[o, tap] x[pixel + tap].

A program computes a tile of output channels of one group and of consecutive output pixels. It reads through pointers:
any stride, padding, dilation, groups and dtype.
"""

import triton
import triton.language as tl

from bagu.ops.kernels.gemm import activated


@triton.jit
def pointer_kernel(
    x_ptr, w_ptr, bias_ptr, x_scale_ptr, w_scale_ptr, y_ptr, B, H, W, C, O, P, Q, I, stride_h, stride_w, pad_h, pad_w,
    dilation_h, dilation_w, groups, R: tl.constexpr, S: tl.constexpr, PIXELS: tl.constexpr, OUT: tl.constexpr,
    BC: tl.constexpr, STAGES: tl.constexpr, SUMS: tl.constexpr, ACC: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    per = O // groups
    deep = tl.cdiv(per, OUT)
    tile, g = tl.program_id(0) // deep, tl.program_id(1)
    k = tl.program_id(0) % deep * OUT + tl.arange(0, OUT)  # output channels of the group
    o = g * per + k
    pixel = tile.to(tl.int64) * PIXELS + tl.arange(0, PIXELS)
    b, p, q = pixel // (P * Q), pixel // Q % P, pixel % Q
    top, left = p * stride_h - pad_h, q * stride_w - pad_w
    blocks = tl.cdiv(I, BC)
    total = tl.zeros([OUT, PIXELS], SUMS)
    for i in tl.range(0, R * S * blocks, num_stages=STAGES):
        tap, c = i // blocks, i % blocks * BC + tl.arange(0, BC)
        h, w = top + tap // S * dilation_h, left + tap % S * dilation_w
        inside = (h >= 0) & (h < H) & (w >= 0) & (w < W) & (b < B)
        there = inside[:, None] & (c < I)[None, :]
        x = tl.load(x_ptr + ((b * H + h) * W + w)[:, None] * C + (g * I + c)[None, :], there, 0)
        at = (o.to(tl.int64) * (R * S) + tap)[:, None] * I + c[None, :]
        weight = tl.load(w_ptr + at, (k < per)[:, None] & (c < I)[None, :], 0)
        total = tl.dot(weight, x.T, total, input_precision="ieee", out_dtype=SUMS)
    z = total.to(ACC)
    if x_scale_ptr is not None:
        z = z * tl.load(x_scale_ptr).to(ACC) * tl.load(w_scale_ptr + o, k < per, 0.0).to(ACC)[:, None]
    if bias_ptr is not None:
        z += tl.load(bias_ptr + o, k < per, 0.0).to(ACC)[:, None]
    z = activated(z, ACTIVATION)
    tl.store(y_ptr + pixel[None, :] * O + o[:, None], z, (k < per)[:, None] & (b < B)[None, :])
