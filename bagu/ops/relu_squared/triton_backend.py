"""The square of a ReLU on Triton: one pass over memory per direction, where eager PyTorch makes three and four.

A contiguous tensor is processed as one long row; any other is made contiguous first.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.kernels.launch import triton_acc

TUNABLE = {  # the tests run every combination
    "forward": {"block": (256, 2048), "num_warps": (4, 8)},
    "backward": {"block": (256, 2048), "num_warps": (4, 8)},
}


@triton.jit
def _forward(x_ptr, y_ptr, M, BLOCK: tl.constexpr, ACC: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + m, m < M, 0.0, eviction_policy="evict_last").to(ACC)
    up = tl.where(x < 0.0, 0.0, x)  # NaN < 0 is false, so NaN is kept
    tl.store(y_ptr + m, up * up, m < M)


@triton.jit
def _backward(dy_ptr, x_ptr, dx_ptr, M, BLOCK: tl.constexpr, ACC: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + m, m < M, 0.0, eviction_policy="evict_last").to(ACC)
    x = tl.load(x_ptr + m, m < M, 0.0, eviction_policy="evict_last").to(ACC)
    tl.store(dx_ptr + m, tl.where(x <= 0.0, 0.0, 2.0 * x * dy), m < M)


def forward(x: torch.Tensor, *, block: int = 2048, num_warps: int = 4) -> tuple[torch.Tensor]:
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        _forward[grid](x, y, x.numel(), BLOCK=block, ACC=triton_acc(x.dtype), num_warps=num_warps)
    return (y,)


def backward(dy: torch.Tensor, x: torch.Tensor, *, block: int = 2048, num_warps: int = 4) -> tuple[torch.Tensor]:
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if x.numel():
        grid = (triton.cdiv(x.numel(), block),)
        _backward[grid](dy, x, dx, x.numel(), BLOCK=block, ACC=triton_acc(x.dtype), num_warps=num_warps)
    return (dx,)
