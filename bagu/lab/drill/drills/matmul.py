"""Matrix product."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

TORCH = """import torch

BLOCK = 64


def forward(x, w, bias):
    K, N = x.shape[-1], w.shape[0]
    rows = x.reshape(-1, K).float()
    columns = w.float()
    y = torch.zeros(rows.shape[0], N)
    for k in range(0, K, BLOCK):
        a, b = rows[:, k : k + BLOCK], columns[:, k : k + BLOCK]
        y = y + (a[:, None, :] * b[None, :, :]).sum(-1)
    if bias is not None:
        y = y + bias.float()
    return y.to(x.dtype).reshape(*x.shape[:-1], N)
"""
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, w, bias, y, M, N, K, HAS_BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    n = tl.program_id(1).to(tl.int64) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        a = tl.load(x + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(w + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=inside)


def forward(x, w, bias):
    x, w = x.contiguous(), w.contiguous()
    K, N = x.shape[-1], w.shape[0]
    y = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    if y.numel():
        M = y.numel() // N
        grid = (triton.cdiv(M, 64), triton.cdiv(N, 64))
        b = w if bias is None else bias.contiguous()
        kernel[grid](x, w, b, y, M, N, K, bias is not None, 64, 64, 32)
    return y
"""

DRILL = Drill.of(
    "matmul",
    difficulty=3,
    title=Text("matrix product of a linear layer", "线性层的矩阵乘"),
    task_zh="y = x · wᵀ + bias，w 的形状是 [N, K]；在 fp32 中累加；K 可以为 0。",
    fixed={"residual": None, "row_scale": None, "column_scale": None, "activation": None},
    forbidden=("mm", "bmm", "addmm", "matmul", "linear", "dot", "mv", "baddbmm", "addmv", "torch.einsum", "inner"),
    solutions={"torch": TORCH, "triton": TRITON},
    hints=(
        Text("How often is each element of x read by a naive kernel?", "朴素 kernel 会把 x 的每个元素读多少次？"),
        Text("A tile of the output stays in registers while tiles of x and w pass along K.", "输出的一个块留在寄存器里，x 与 w 的块沿 K 方向流过。"),
        Text("Mask K too: other=0.0 in both loads; add the bias once, after the loop; accumulate in fp32 and round once.", "K 也要 mask：两个 load 都用 other=0.0；循环后再加一次 bias；fp32 累加，只舍入一次。"),
    ),
    questions=(
        Question("From which size on is it bound by compute?", "多大时开始受限于算力？", "bagu ops show matmul"),
        Question("What does split-K change in the bits?", "split-K 会改变结果的哪些位？", "bagu lab list --theme numerics"),
    ),
    planted=(
        Planted("torch", "y = y + bias.float()", "y = y", "ignored"),
        Planted("torch", "rows = x.reshape(-1, K).float()\n    columns = w.float()", "rows = x.reshape(-1, K).half().float()\n    columns = w.half().float()", "precision"),
        Planted("torch", "y = y + (a[:, None, :]", "y = (a[:, None, :]", "formula|tail"),
        Planted("torch", "for k in range(0, K, BLOCK):", "for k in range(0, K - BLOCK + 1, BLOCK):", "tail|formula|off_by_one"),
        Planted("torch", "y.to(x.dtype).reshape(*x.shape[:-1], N)", "y.to(x.dtype)", "type"),
        Planted("torch", "y.to(x.dtype)", "y", "type"),
        Planted("torch", "        y = y + bias.float()", "        y = y + bias.float()[: , None]", "raises|formula|type"),
        Planted("torch", "    if bias is not None:\n        y = y + bias.float()", "    y = y + bias.float()", "raises"),
        Planted("torch", "y = y + (a[:, None, :] * b[None, :, :]).sum(-1)", "y = (y + (a[:, None, :] * b[None, :, :]).sum(-1)).half().float()", "precision|formula|ignored"),
        Planted("torch", "y = y + (a[:, None, :] * b[None, :, :]).sum(-1)", "y = y + (a[:, None, :] * b[None, :, :]).half().float().sum(-1)", "precision|formula|ignored"),
        Planted("torch", "y = y + (a[:, None, :] * b[None, :, :]).sum(-1)\n", "y = y + (a[:, None, :] * b[None, :, :]).sum(-1)\n        y = y + (bias.float() if bias is not None else 0)\n", "formula|factor"),
        Planted("torch", "y.to(x.dtype).reshape", "(y / K**0.5).to(x.dtype).reshape", "factor"),
        Planted("torch", "y = torch.zeros(rows.shape[0], N)", "y = torch.empty(rows.shape[0], N)", "unwritten|overflow|formula|special"),
        Planted("triton", "mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)", "mask=(n[None, :] < N) & (k[:, None] < K), other=1.0)\n        a += 0.001", "formula|tail"),
        Planted("triton", "w + n[None, :] * K + k[:, None]", "w + n[None, :] + k[:, None] * N", "order|formula|dies"),
        Planted("triton", "    x, w = x.contiguous(), w.contiguous()\n", "", "stride|dies"),
    ),
)  # fmt: skip
