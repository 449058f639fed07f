"""The 4-bit linear layer on Triton: for few rows, when reading the weight takes most of the time.

Tiles of 16 or 32 rows of x are products of mma.sync, whose second operand may be in registers: the weight is unpacked
there and never written to shared memory. K is divided among programs until all multiprocessors are busy; the parts of a
sum are then added in their order by a second kernel, so a result has the same bits in every run. On Hopper that is a
dependent launch, as in paged_attention/join.py.
"""

from __future__ import annotations

import torch
import triton

from bagu.ops.int4_matmul.int4_kernels import add_parts_kernel, int4_kernel
from bagu.ops.int4_matmul.layout import GROUP
from bagu.ops.int4_matmul.spec import Args
from bagu.ops.kernels.launch import as_rows, num_sms, starts_early, triton_acc

TUNABLE = {"forward": {"block_n": (64, 128), "parts": (None, 2), "stages": (4, 6)}}  # the tests run every combination

PROGRAMS_PER_SM = 2  # of 1 to 8, the fastest for 16 x 4096 x 14336 and 16 x 14336 x 4096 on an H200
SHORTEST = 4  # groups of a program: fewer would take less time than a launch


def _parts(tiles: int, groups: int, sms: int) -> int:
    """Into how many parts K is divided."""
    return max(1, min(PROGRAMS_PER_SM * sms // tiles, groups // SHORTEST))


def forward(
    a: Args, *, block_n: int | None = None, parts: int | None = None, stages: int | None = None
) -> tuple[torch.Tensor]:
    x, packed, scales = a.x, a.packed, a.scales
    y = torch.empty(*x.shape[:-1], packed.shape[0], dtype=x.dtype, device=x.device)
    if not y.numel():
        return (y,)
    rows, packed = as_rows(x), as_rows(packed)
    (M, K), (N, P), G = rows.shape, packed.shape, scales.shape[1]
    acc = torch.float64 if torch.float64 in (x.dtype, scales.dtype) else torch.float32  # torch.promote_types is an op
    wide = x.element_size() > 2  # without tensor cores
    BM, BN = 16 if wide or M <= 16 else 32, 32 if wide else block_n or 128
    tiles = triton.cdiv(M, BM), triton.cdiv(N, BN)
    per_part = max(1, triton.cdiv(G, parts or _parts(tiles[0] * tiles[1], G, num_sms(x.device))))
    parts = max(1, triton.cdiv(G, per_part))
    out = y if parts == 1 else torch.empty(parts, M, N, dtype=acc, device=x.device)
    added, early = None if a.bias is None else a.bias.contiguous(), starts_early(x.device)
    int4_kernel[(tiles[1], tiles[0], parts)](
        rows, packed, scales, a.zeros, added if parts == 1 else None, out, M, N, P, G, per_part, rows.stride(0),
        packed.stride(0), *scales.stride(), *((0, 0) if a.zeros is None else a.zeros.stride()), BM=BM, BN=BN,
        EVEN=K % GROUP == 0, STAGES=1 if wide else stages or 4, SUMS=triton_acc(x.dtype), ACC=triton_acc(acc),
        EARLY=parts > 1 and early, num_warps=4,
    )  # fmt: skip
    if parts > 1:
        block = 512
        add_parts_kernel[(triton.cdiv(M * N, block),)](
            out, added, y, M * N, N, PARTS=parts, BLOCK=block, EARLY=early, num_warps=4, launch_pdl=early
        )
    return (y,)
