"""Transpose of any two dims."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

TORCH = """import torch


def forward(x, dim0, dim1):
    if x.ndim == 0:
        return x.clone()
    order = list(range(x.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    sizes = [x.shape[d] for d in order]
    strides = [x.stride(d) for d in order]
    y = torch.empty(sizes, dtype=x.dtype)
    y.copy_(torch.as_strided(x, sizes, strides, x.storage_offset()))
    return y
"""
TRITON = '''import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, A, M, B, N, C, BM: tl.constexpr, BN: tl.constexpr):
    """x[A, M, B, N, C] -> y[A, N, B, M, C], a tile of M x N for each (a, b, c)."""
    which = tl.program_id(2).to(tl.int64)
    c, b, a = which % C, which // C % B, which // (C * B)
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    inside = (m[:, None] < M) & (n[None, :] < N)
    v = tl.load(x + (((a * M + m[:, None]) * B + b) * N + n[None, :]) * C + c, mask=inside)
    tl.store(y + (((a * N + n[None, :]) * B + b) * M + m[:, None]) * C + c, v, mask=inside)


def product(sizes):
    out = 1
    for s in sizes:
        out *= s
    return out


def forward(x, dim0, dim1):
    if x.ndim == 0:
        return x.clone()
    x = x.contiguous()
    p, q = sorted((dim0 % x.ndim, dim1 % x.ndim))
    if p == q:
        return x.clone()
    sizes = list(x.shape)
    A, M, B, N, C = product(sizes[:p]), sizes[p], product(sizes[p + 1 : q]), sizes[q], product(sizes[q + 1 :])
    sizes[p], sizes[q] = N, M
    y = torch.empty(sizes, dtype=x.dtype, device=x.device)
    if y.numel():
        raw = x.view(torch.uint8) if x.dtype == torch.bool else x
        out = y.view(torch.uint8) if x.dtype == torch.bool else y
        grid = (triton.cdiv(M, 32), triton.cdiv(N, 32), A * B * C)
        kernel[grid](raw, out, A, M, B, N, C, 32, 32)
    return y
'''

DRILL = Drill.of(
    "transpose",
    difficulty=2,
    title=Text("transpose two dims", "转置任意两维"),
    task_zh="交换张量的两维，结果连续。任意 dtype，维号可以为负，同一维两次即复制。",
    forbidden=("torch.transpose", "torch.Tensor.transpose", "torch.Tensor.contiguous_", "torch.Tensor.swapaxes", "torch.swapaxes", "torch.Tensor.permute", "torch.permute", "torch.einsum"),
    solutions={"torch": TORCH, "triton": TRITON},
    hints=(
        Text("Reading a row is fast, writing a column is slow: which of the two can you choose?", "按行读快，按列写慢：你能选择哪一个？"),
        Text("Treat the dims before, between and after the two as three numbers: x[A, M, B, N, C].", "把两维之前、之间、之后的维各合并为一个数：x[A, M, B, N, C]。"),
        Text("One program moves a tile of 32 x 32 of (m, n); its load runs along n, its store along m; mask both sides.", "一个 program 搬一个 32×32 的 (m, n) 块；沿 n 读、沿 m 写；两侧都要 mask。"),
    ),
    questions=(
        Question("What are bank conflicts, and why does a padded tile avoid them?", "什么是 bank conflict？为什么加一列填充能避免？", "bagu lab list --theme gpu"),
        Question("Which share of the copy bandwidth can it reach?", "能达到拷贝带宽的多少？", "bagu ops show transpose"),
    ),
    planted=(
        Planted("torch", "    if x.ndim == 0:\n        return x.clone()\n", "", "raises|edge"),
        Planted("torch", "strides = [x.stride(d) for d in order]", "strides = list(torch.empty(x.shape).stride())", "formula|order|raises|rows"),
        Planted("torch", "dtype=x.dtype)", "dtype=torch.float32)", "type"),
        Planted("torch", "    return y\n", "    return torch.as_strided(x, sizes, strides, x.storage_offset())\n", "type"),
        Planted("torch", "order[dim0], order[dim1] = order[dim1], order[dim0]", "order[-1], order[-2] = order[-2], order[-1]", "ignored|type|formula|raises"),
        Planted("torch", "order[dim0], order[dim1] = order[dim1], order[dim0]", "order = order[::-1]", "type|formula|order|rows"),
        Planted("torch", "x.storage_offset()", "x.storage_offset() + 1", "raises|formula|off_by_one"),
        Planted("torch", "sizes = [x.shape[d] for d in order]", "sizes = list(x.shape)", "type|raises|formula"),
        Planted("torch", "    return y\n", "    y.view(-1)[-1:] = 0\n    return y\n", "tail|rows|formula"),
        Planted("torch", "    y.copy_(torch.as_strided(x, sizes, strides, x.storage_offset()))\n", "", "unwritten|overflow|formula|special"),
        Planted("torch", "    return y\n", "    return y.float().to(x.dtype)\n", "precision|formula"),
        Planted("triton", "(m[:, None] < M) & (n[None, :] < N)", "(m[:, None] < M) & (n[None, :] < N - 1)", "tail|rows|unwritten"),
        Planted("triton", "* B + b) * M + m[:, None]", "* B + b) * N + m[:, None]", "formula|stride|dies|unwritten|rows"),
        Planted("triton", "    x = x.contiguous()\n", "", "stride"),
        Planted("triton", "grid = (triton.cdiv(M, 32)", "grid = (max(1, M // 32)", "rows|tail|unwritten"),
    ),
)  # fmt: skip
