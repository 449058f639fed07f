"""Dependent launches (Hopper and later): a kernel starts before the previous one has ended, and waits for its end.

The launch then takes no time, and a product can ask for its weights while it waits (matmul/few_rows.py). A kernel lets
the next one start when its own wait is over, not before: programs that start while many others still run are placed
wherever there is room, two on one multiprocessor and none on another, and the kernel takes longer than it won. On an
H200 a decode step of Qwen3-0.6B's shape takes 1.23 ms without dependent launches, 1.24 if every kernel starts the next
one before it waits, and 1.03 if after; of an 8B shape 4.57, 4.46 and 4.34 ms.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start(EARLY: tl.constexpr):
    """Call it first in a kernel that is launched with `launch_pdl=EARLY`: it reads and writes nothing before."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
