"""Rows of a matrix that a program keeps in registers.

A row of N columns is a block of BLOCK_N columns, a power of two, and, if N is slightly larger than BLOCK_N, a tail of
TAIL columns (`launch.split_row`): 4,096 and 1,024 for 5,120, since a block of 8,192 would waste many registers. In a
kernel a row is a tuple of one or two tensors, [BLOCK_M, BLOCK_N] and [BLOCK_M, TAIL]; these functions take such tuples.
With FULL, the block has no columns beyond N, so it needs no mask.

Loads are 128 bits wide if Triton can prove that rows begin at multiples of 16 elements (`launch.aligned`). Other rows
move one element at a time, which costs up to 40 % of the speed.
"""

import triton
import triton.language as tl


@triton.jit
def row_ids(tile, BLOCK_M: tl.constexpr):
    """The rows of a tile, [BLOCK_M, 1]."""
    return tile * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]


@triton.jit
def columns(BLOCK_N: tl.constexpr, TAIL: tl.constexpr, ALIGNED: tl.constexpr = True):
    """The columns of the block and of the tail.

    A weight can be aligned when the rows are not. Triton would then give it another layout than the rows, and convert
    every row through shared memory. If ALIGNED is false, the columns look scattered to Triton, which prevents that.
    """
    block = tl.arange(0, BLOCK_N)[None, :]
    if not ALIGNED:
        block = tl.max_contiguous(block, [1, 1])
    if TAIL:
        return (block, BLOCK_N + tl.arange(0, TAIL)[None, :])
    else:
        return (block,)


@triton.jit
def masks(m, n, M, N, FULL: tl.constexpr):
    """Masks of the elements of rows m and columns n that exist."""
    if len(n) == 2:
        return (m < M, (m < M) & (n[1] < N))
    elif FULL:
        return (m < M,)
    else:
        return ((m < M) & (n[0] < N),)


@triton.jit
def load_row(ptr, m, n, mask, stride, other=0.0):
    """Load rows m in their stored dtype; masked elements are `other`."""
    block = tl.load(ptr + m * stride + n[0], mask[0], other, eviction_policy="evict_last")
    if len(n) == 2:
        return (block, tl.load(ptr + m * stride + n[1], mask[1], other, eviction_policy="evict_last"))
    else:
        return (block,)


@triton.jit
def store_row(ptr, m, n, mask, stride, x):
    tl.store(ptr + m * stride + n[0], x[0], mask[0])
    if len(n) == 2:
        tl.store(ptr + m * stride + n[1], x[1], mask[1])


@triton.jit
def sum_row(x):
    """The sum of each row: [BLOCK_M, 1], or a scalar if BLOCK_M is 1.

    With a [1, 1] tile, the sums of block and tail would need the same layout, and Triton would load the tail twice.
    """
    if x[0].shape[0] == 1:
        total = tl.sum(x[0])
        if len(x) == 2:
            total += tl.sum(x[1])
        return total
    else:
        total = tl.sum(x[0], axis=1)
        if len(x) == 2:
            total += tl.sum(x[1], axis=1)
        return total[:, None]


@triton.jit
def max_row(x):
    """The maximum of each row, in the shape of `sum_row`. It ignores NaN."""
    if x[0].shape[0] == 1:
        top = tl.max(x[0])
        if len(x) == 2:
            top = tl.maximum(top, tl.max(x[1]))
        return top
    else:
        top = tl.max(x[0], axis=1)
        if len(x) == 2:
            top = tl.maximum(top, tl.max(x[1], axis=1))
        return top[:, None]


@triton.jit
def add(a, b):
    """a + b."""
    if len(a) == 2:
        return (a[0] + b[0], a[1] + b[1])
    else:
        return (a[0] + b[0],)


@triton.jit
def multiply(a, b):
    """a * b."""
    if len(a) == 2:
        return (a[0] * b[0], a[1] * b[1])
    else:
        return (a[0] * b[0],)


@triton.jit
def select(mask, a):
    """a where the mask is true, else 0."""
    if len(a) == 2:
        return (tl.where(mask[0], a[0], 0.0), tl.where(mask[1], a[1], 0.0))
    else:
        return (tl.where(mask[0], a[0], 0.0),)
