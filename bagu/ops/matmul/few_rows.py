"""The product of a few rows, as in a decode step: y = x wᵀ + bias is bound by reading w once.

cuBLAS reads w at 0.30 to 0.97 of copy bandwidth there: it begins to read when the kernel before it has ended, and where
w has few rows it splits K and adds the parts in a second kernel. Here a program has all of K for a few rows of w, and
the launch is a dependent one (kernels/early.py): while it waits, it asks for the first lines of its weights.

On an H200, a norm and the product of one row after it, in µs by cuBLAS and here: an 8B model's qkv 18.5 and 15.5, out
15.0 and 11.1, gate and up 59.5 and 58.4, down 35.0 and 31.7; of 32 rows 17.6 and 16.4, 13.9 and 11.9, 60.0 and 61.6,
35.6 and 34.3. The step of 32 streams takes 1.18 ms for 8 layers instead of 1.24: no kernel waits for cuBLAS to end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bagu.ops.kernels.launch import starts_early

SWAPPED = 4096  # rows of w, of which 64 programs have 64 each; fewer programs do not saturate the memory
OLDER = 3  # stages on GPUs before Hopper, which may have 99 KiB of shared memory instead of 227
LINE = 64  # numbers of 16 bits that L2 reads at once


@dataclass(frozen=True, kw_only=True)
class Tile:
    """N rows of w by K columns at a time. `ahead`: lines of each row to ask for early, a power of two. `swap`: the
    tile is one of yᵀ = w xᵀ instead of y = x wᵀ. A wgmma has 64 rows, which w can fill, and reads w from shared
    memory without registers."""

    N: int
    K: int
    stages: int
    warps: int = 4
    ahead: int = 8
    swap: bool = False


def _tile(N: int) -> Tile:
    """The best of twelve at the sizes of the 0.6B model, of sixty with `swap` at those of the 8B model. Every program
    reads x, from L2, so the more rows w has, the more are in a tile."""
    if N <= 2048:
        return Tile(N=16, K=512, stages=4, ahead=32)
    if N < SWAPPED:
        return Tile(N=32, K=256, stages=4)
    return Tile(N=64, K=128, stages=8, swap=True) if N <= 8192 else Tile(N=128, K=128, stages=4, ahead=0, swap=True)


@triton.jit
def _ask(at):
    """Ask for the lines at these addresses. It is safe even if another kernel writes them: L2 sees all writes."""
    tl.inline_asm_elementwise(  # Triton 3.6 wants the text itself here, not a name
        "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def few_rows_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, M, N, K, x_stride, w_stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, SWAP: tl.constexpr, AHEAD: tl.constexpr, EVERY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    n, m, k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM), tl.arange(0, BK)
    w_rows = w_ptr + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_stride
    if EARLY:
        if AHEAD > 0:
            _ask(w_rows + tl.minimum(EVERY * tl.arange(0, AHEAD), K - 1)[None, :])
        gdc_wait()
        gdc_launch_dependents()
    x_rows, real = x_ptr + m.to(tl.int64)[:, None] * x_stride, (m < M)[:, None]
    total = tl.zeros([BN, BM] if SWAP else [BM, BN], tl.float32)
    for at in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_rows + (at + k)[None, :], real, 0.0)
        w = tl.load(w_rows + (at + k)[None, :])
        total = tl.dot(w, x.T, total) if SWAP else tl.dot(x, w.T, total)
    if SWAP:
        total = total.T
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + m.to(tl.int64)[:, None] * N + n[None, :], total, real & (n < N)[None, :])


def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """Write x[M, K] wᵀ + bias to y[*M, N]."""
    (M, K), N, early = x.shape, w.shape[0], starts_early(x.device)
    tile = _tile(N)
    few_rows_kernel[(triton.cdiv(N, tile.N),)](
        x, w, bias, y, M, N, K, x.stride(0), w.stride(0), BM=16 if M <= 16 else 32, BN=tile.N, BK=tile.K,
        STAGES=tile.stages if early else OLDER, SWAP=tile.swap, AHEAD=tile.ahead, EVERY=LINE, EARLY=early,
        num_warps=tile.warps, launch_pdl=early,
    )  # fmt: skip
