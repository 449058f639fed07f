"""Triton kernels that ask for no width of loads, no shared memory and no barrier. Imports Triton: a lab imports this
file where it runs.

add        a sum of two arrays that are read with a stride
softmax    a program for each row
turn       a transpose by tiles: read by rows, written by columns
"""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride, i < n) + tl.load(y + i * stride, i < n), i < n)


@triton.jit
def softmax(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * n + i, i < n, float("-inf"))
    e = tl.exp(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * n + i, e / tl.sum(e, 0), i < n)


@triton.jit
def turn(x, out, rows, columns, BLOCK: tl.constexpr):
    i, j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x + i[:, None] * columns + j[None, :])
    tl.store(out + j[None, :] * rows + i[:, None], tile)
