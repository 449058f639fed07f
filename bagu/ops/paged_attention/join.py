"""Join the results of ranges of keys: attention splits the keys of a sequence if there are too few programs.

On Hopper and later GPUs the join is a dependent launch: its programs start while the kernel before it still runs, and
wait for the end of that kernel. The launch itself then takes no time between the two.
"""

import torch
import triton
import triton.language as tl

from bagu.ops.attention.block_sizes import width
from bagu.ops.attention.score_kernels import LN2
from bagu.ops.kernels.early import start
from bagu.ops.kernels.launch import starts_early, triton_acc

RANGES = 16  # that a program reads at once


@triton.jit(do_not_specialize=["splits", "rows"])
def join_kernel(
    parts_ptr, part_lse_ptr, out_ptr, lse_ptr, splits, rows, E: tl.constexpr, EW: tl.constexpr, P: tl.constexpr,
    ACC: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out and lse of one query head, from the results of its ranges of keys, P at a time."""
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, EW)
    top, total = tl.full([], float("-inf"), ACC), tl.zeros([], ACC)
    mixed = tl.zeros([EW], ACC)
    start(EARLY)
    for at in range(0, splits, P):
        p = at + tl.arange(0, P)
        source = p.to(tl.int64) * rows + row
        lse = tl.load(part_lse_ptr + source, p < splits, float("-inf"))
        parts = tl.load(parts_ptr + source[:, None] * E + e[None, :], (p < splits)[:, None] & (e < E)[None, :], 0.0)
        parts = tl.where((lse > float("-inf"))[:, None], parts, 0.0)  # a range without keys wrote no values
        higher = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept, weight = tl.exp2(top - base), tl.exp2(lse - base)
        mixed = mixed * kept + tl.sum(weight[:, None] * parts, 0)
        top, total = higher, total * kept + tl.sum(weight, 0)
    tl.store(lse_ptr + row, (top + tl.log2(total)) * LN2)
    tl.store(out_ptr + row * E + e, mixed / tl.where(total == 0.0, 1.0, total), e < E)


def join(parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Write out[T, H, E] and lse[T, H] from parts[splits, T, H, E] and part_lse[splits, T, H], which is in base 2."""
    splits, T, H, E = parts.shape
    early = starts_early(out.device)
    join_kernel[(T * H,)](
        parts, part_lse, out, lse, splits, T * H, E=E, EW=width(E), P=RANGES, ACC=triton_acc(out.dtype), EARLY=early,
        num_warps=max(1, width(E) // 128), launch_pdl=early,
    )  # fmt: skip
