"""Block sizes of the attention kernels, by head size and dtype: rows and columns of scores, warps, stages.

16-bit inputs on Hopper are read by TMA and multiplied by wgmma; their sizes are measured on an H200 (docs/journal/004).
Two or more programs of 4 warps per multiprocessor are fastest: one computes a softmax while the other multiplies.
All other inputs (fp32 and fp64, which tensor cores would round, and older GPUs) are read through pointers, in small
blocks that fit any GPU.
"""

from dataclasses import dataclass, replace

import torch

from bagu.ops.kernels.launch import is_hopper, next_power_of_2

WIDEST = 256  # the most features of a head that a tile can hold


@dataclass(frozen=True, kw_only=True)
class Block:
    """How one kernel divides the scores: M queries by N keys."""

    M: int
    N: int
    warps: int
    stages: int
    registers: int | None = None  # at most this many per thread, so that one more program fits a multiprocessor


@dataclass(frozen=True, kw_only=True)
class Blocks:
    forward: Block
    dq: Block
    dkdv: Block


MEASURED = {  # by the tile widths of keys and values
    (64, 64): Blocks(
        forward=Block(M=64, N=128, warps=4, stages=2),
        dq=Block(M=128, N=64, warps=8, stages=3),
        dkdv=Block(M=64, N=64, warps=4, stages=3, registers=168),
    ),
    (128, 128): Blocks(
        forward=Block(M=64, N=64, warps=4, stages=3),
        dq=Block(M=128, N=64, warps=8, stages=3),
        dkdv=Block(M=64, N=64, warps=4, stages=2),
    ),
    (256, 128): Blocks(  # MLA's 192 and 128
        forward=Block(M=64, N=32, warps=4, stages=3),
        dq=Block(M=128, N=64, warps=8, stages=2),
        dkdv=Block(M=32, N=64, warps=4, stages=2),
    ),
    (256, 256): Blocks(
        forward=Block(M=128, N=64, warps=8, stages=2),
        dq=Block(M=128, N=32, warps=8, stages=3),
        dkdv=Block(M=64, N=64, warps=8, stages=2),
    ),
}
# A window or a cap needs registers, and dk and dv with 64 queries have none left. Heads of 128, varlen 16k: 749 us
# instead of 834 with a window of 1,024, 2,599 instead of 3,037 with a cap. Heads of 256: the larger block spills (not
# timed).
DKDV_WITH_TERMS = {
    (128, 128): Block(M=32, N=64, warps=4, stages=2),
    (256, 256): Block(M=32, N=64, warps=8, stages=2),
}
SMALL = Block(M=32, N=32, warps=4, stages=1)


def width(features: int) -> int:
    """The columns of a tile that holds a head: a power of two and at least 16, as tl.dot requires."""
    return max(16, next_power_of_2(features))


def blocks_for(D: int, E: int, *, tma: bool, terms: bool) -> Blocks:
    """`terms`: there is a window or a softcap."""
    if not tma:
        return Blocks(forward=SMALL, dq=SMALL, dkdv=SMALL)
    widths = max(64, width(D)), max(64, width(E))
    widths = widths if widths in MEASURED else (max(widths), max(widths))
    blocks = MEASURED[widths]
    return replace(blocks, dkdv=DKDV_WITH_TERMS.get(widths, blocks.dkdv)) if terms else blocks


def reads_by_tma(x: torch.Tensor) -> bool:
    return x.element_size() == 2 and (x.device.type != "cuda" or is_hopper(x.device))
