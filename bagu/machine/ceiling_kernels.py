"""Simple Triton kernels that read, write and copy. They are candidates for the bandwidth ceilings of a GPU.

torch's own reduction may not reach the read bandwidth of a GPU. With too low a ceiling, a fast kernel would show
103 % of it. Each program moves one block of B fp32 elements and issues all its loads before it uses the first. The
caller sizes buffers to a multiple of `BLOCK`. This module needs Triton: import it only to run a GPU kernel.
"""

import torch
import triton
import triton.language as tl

BLOCK = 16384  # 512 threads x 32 elements: 8 loads of 16 bytes in flight per thread
WARPS = 16


@triton.jit
def _copy_kernel(dst: tl.tensor, src: tl.tensor, B: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(dst + at, tl.load(src + at))


@triton.jit
def _write_kernel(dst: tl.tensor, value: tl.tensor, B: tl.constexpr) -> None:
    at = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(dst + at, tl.full((B,), 0.0, tl.float32) + value)


@triton.jit
def _read_kernel(out: tl.tensor, src: tl.tensor, B: tl.constexpr) -> None:
    pid = tl.program_id(0).to(tl.int64)
    tl.store(out + pid, tl.sum(tl.load(src + pid * B + tl.arange(0, B))))


def copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """dst[:] = src; both 1-D contiguous fp32 of a multiple of BLOCK elements."""
    _copy_kernel[(_blocks(src),)](dst, src, B=BLOCK, num_warps=WARPS)


def write(dst: torch.Tensor, value: float) -> None:
    """dst[:] = value."""
    _write_kernel[(_blocks(dst),)](dst, value, B=BLOCK, num_warps=WARPS)


def read(out: torch.Tensor, src: torch.Tensor) -> None:
    """out[i] = sum of block i of src; `out` holds src.numel() // BLOCK elements, 1/16384 of the bytes read."""
    _read_kernel[(_blocks(src),)](out, src, B=BLOCK, num_warps=WARPS)


def _blocks(x: torch.Tensor) -> int:
    blocks, rest = divmod(x.numel(), BLOCK)
    assert rest == 0, f"{x.numel()} elements are not a multiple of {BLOCK}"
    return blocks
