"""Triton kernels of the GPU labs. Imports Triton: a lab imports this file where it runs.

matmul    with what labs vary: program order, pointers or descriptors (TMA), warp specialization
sums      `rounds` sums of a block by tl.sum
"""

import torch
import triton
import triton.language as tl

TILE_M, TILE_N, TILE_K = 128, 256, 64


@triton.jit
def tiles(
    a, b, c, M, N, K, GROUP: tl.constexpr, TMA: tl.constexpr, SPECIALIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    pid, down, across = tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN)
    first = pid // (GROUP * across) * GROUP
    rows = tl.minimum(down - first, GROUP)
    m = first + (pid % (GROUP * across)) % rows
    n = (pid % (GROUP * across)) // rows
    total = tl.zeros((BM, BN), tl.float32)
    rm, rn, rk = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN), tl.arange(0, BK)
    if TMA:
        left = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
        right = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
        for k in tl.range(0, K, BK, warp_specialize=SPECIALIZE):
            total = tl.dot(left.load([m * BM, k]), right.load([n * BN, k]).T, total)
    else:
        for k in tl.range(0, K, BK):
            x = tl.load(a + rm[:, None] * K + (k + rk)[None, :])
            y = tl.load(b + rn[None, :] * K + (k + rk)[:, None])
            total = tl.dot(x, y, total)
    tl.store(c + rm[:, None] * N + rn[None, :], total.to(c.dtype.element_ty))


@triton.jit
def sums(x, y, rounds, SIZE: tl.constexpr):
    block = tl.program_id(0)
    v = tl.load(x + block * SIZE + tl.arange(0, SIZE))
    total = 0.0
    for k in range(rounds):
        total += tl.sum(v + k, 0)
    tl.store(y + block, total)


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: int = 8,
    tma: bool = False,
    specialize: bool = False,
    warps: int = 8,
    stages: int = 3,
) -> torch.Tensor:
    """a[M, K] · b[N, K]ᵀ in bf16; M, N, K are multiples of the tile."""
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda"))
    (M, K), N = a.shape, b.shape[0]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    tiles[(M // TILE_M * (N // TILE_N),)](
        a, b, c, M, N, K, group, tma, specialize, TILE_M, TILE_N, TILE_K, num_warps=warps, num_stages=stages
    )
    return c
