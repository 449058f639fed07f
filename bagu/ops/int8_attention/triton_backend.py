"""int8 attention with Triton kernels over packed segments of any lengths.

    key_kernels.py      the mean of the keys, and the keys as int8: 1 to 2 % of the time at 16k tokens
    attend_kernel.py    queries as int8, the products and the softmax

The list of blocks, the masks and the loads are those of `attention`.
"""

from __future__ import annotations

from typing import Any

import torch

from bagu.ops.attention.block_sizes import Block
from bagu.ops.attention.triton_backend import LOG2E, readable
from bagu.ops.attention.work_list import list_tiles
from bagu.ops.contract.signature import accumulator
from bagu.ops.int8_attention.attend_kernel import attend_kernel
from bagu.ops.int8_attention.key_kernels import quantize_kernel, sum_kernel
from bagu.ops.int8_attention.spec import GROUP, Args
from bagu.ops.kernels.launch import fp32_pair, is_hopper, next_power_of_2, triton_acc
from bagu.ops.replay.launcher import with_scratch_memory

HOPPER = Block(M=128, N=128, warps=4, stages=2)  # two groups of 64 queries
SMALL = Block(M=32, N=32, warps=4, stages=1)  # fp32, which tensor cores would round, and older GPUs


def quantized_keys(k: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k[T, G, D] as int8, and the scales[G, T] of groups of keys: each at the first key of its group."""
    (T, G, D), segments, cu = k.shape, cu_seqlens.shape[0] - 1, cu_seqlens.contiguous()
    kept, acc = accumulator(k.dtype), triton_acc(k.dtype)
    parts = min(next_power_of_2(max_len // 128), 32)
    sums, scales = k.new_empty(segments, G, parts, D, dtype=kept), k.new_empty(G, T, dtype=kept)
    k8 = k.new_empty(T, G, D, dtype=torch.int8)
    sum_kernel[(segments, G, parts)](
        k, cu, sums, T, G, k.stride(0), k.stride(1), D=D, PARTS=parts, ROWS=64, STAGES=3, ACC=acc, num_warps=4
    )
    tiles, count = list_tiles(cu, T, max_len, GROUP, from_end=False)
    quantize_kernel[(count, G)](
        k, cu, sums, tiles, k8, scales, T, G, segments, k.stride(0), k.stride(1),
        D=D, PARTS=parts, GROUP=GROUP, SEGMENTS=next_power_of_2(segments), ACC=acc, num_warps=8,
    )  # fmt: skip
    return k8, scales


def forward(a: Args) -> tuple[torch.Tensor]:
    q, k, v, scale = a.q, a.k, a.v, a.scale
    (T, H, D), G = q.shape, k.shape[1]
    out = q.new_empty(T, H, D)
    if T == 0:
        return (out,)
    scale = (D**-0.5 if scale is None else scale) * LOG2E
    hopper = _fits_hopper(q)
    block = HOPPER if hopper else SMALL
    q, k, v = (readable(x) for x in (q, k, v))
    k8, k_scale = quantized_keys(k, a.cu_seqlens, a.max_len)
    tiles, count = list_tiles(a.cu_seqlens, T, a.max_len, block.M, from_end=False)
    given = q, k8, v, k_scale, out, tiles, T, H, H // G
    strides = q.stride(0), G * D, v.stride(0), q.stride(1), D, v.stride(1)
    sizes: dict[str, Any] = {
        "D": D,
        "M": block.M,
        "N": block.N,
        "GROUP": GROUP,
        "STAGES": block.stages,
        "CAUSAL": a.causal,
        "num_warps": block.warps,
    }
    if hopper:
        from bagu.ops.int8_attention.hopper_kernel import hopper_kernel

        with_scratch_memory(hopper_kernel[(count, H)])(*given, scale, *strides, **sizes)
    else:
        attend_kernel[(count, H)](*given, *fp32_pair(scale), *strides, ACC=triton_acc(q.dtype), **sizes)
    return (out,)


def _fits_hopper(q: torch.Tensor) -> bool:
    """Whether hopper_kernel.py can run this call: it multiplies by wgmma, 16-bit values."""
    return q.element_size() == 2 and (q.is_meta or (q.is_cuda and is_hopper(q.device)))
