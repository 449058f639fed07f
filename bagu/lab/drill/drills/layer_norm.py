"""LayerNorm."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

TORCH = """import torch


def forward(x, w, b, eps):
    xf = x.float()
    c = xf - xf.mean(-1, keepdim=True)
    r = torch.rsqrt((c * c).mean(-1, keepdim=True) + eps)
    y = c * r * w.float()
    if b is not None:
        y = y + b.float()
    return y.to(x.dtype)
"""
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, w, b, y, N, eps, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    v = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(v, 0) / N
    c = tl.where(inside, v - mean, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(c * c, 0) / N + eps)
    out = c * r * tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + column, out.to(y.dtype.element_ty), mask=inside)


def forward(x, w, b, eps):
    x, w = x.contiguous(), w.contiguous()
    N = x.shape[-1]
    y = torch.empty_like(x)
    rows = x.numel() // N if N else 0
    if rows:
        kernel[(rows,)](x, w, w if b is None else b.contiguous(), y, N, eps, b is not None, triton.next_power_of_2(N))
    return y
"""

DRILL = Drill.of(
    "layer_norm",
    difficulty=2,
    title=Text("LayerNorm", "LayerNorm"),
    task_zh="把每一行归一到零均值、单位方差，再按特征缩放和平移。",
    forbidden=("native_layer_norm", "torch.nn.functional.layer_norm", "torch.layer_norm", "var", "var_mean", "std", "std_mean"),
    solutions={"torch": TORCH, "triton": TRITON},
    hints=(
        Text("Is the mean of squares minus the square of the mean safe in fp32?", "平方的均值减均值的平方，在 fp32 中安全吗？"),
        Text("Centre first, then square: two passes over values that are in registers cost nothing.", "先减均值再平方：寄存器里的第二遍几乎不花时间。"),
        Text("Masked columns hold 0 - mean after centring: set them to 0 before the sum of squares; divide by N, not by N - 1.",
             "被遮住的列在减均值后是 -mean：平方求和前置 0；除以 N 而不是 N-1。"),
    ),
    questions=(
        Question("What does Welford's method buy?", "Welford 算法的好处是什么？", "bagu lab run welford"),
        Question("Pre-norm or post-norm?", "pre-norm 还是 post-norm？", "bagu lab run prenorm_postnorm"),
    ),
    planted=(
        Planted("torch", "c = xf - xf.mean(-1, keepdim=True)", "c = xf", "formula"),
        Planted("torch", "(c * c).mean(-1, keepdim=True)", "((c * c).sum(-1, keepdim=True) / (x.shape[-1] - 1))", "off_by_one"),
        Planted("torch", " + eps)", ")", "eps"),
        Planted("torch", "torch.rsqrt((c * c).mean(-1, keepdim=True) + eps)", "1 / ((c * c).mean(-1, keepdim=True).sqrt() + eps)", "eps"),
        Planted("torch", "(c * c).mean(-1, keepdim=True) + eps", "(xf * xf).mean(-1, keepdim=True) - xf.mean(-1, keepdim=True) ** 2 + eps", "precision|formula|special"),
        Planted("torch", "y = y + b.float()", "y = y", "ignored"),
        Planted("torch", "c * r * w.float()", "c * r", "factor|ignored"),
        Planted("torch", "xf = x.float()", "xf = x", "precision|overflow"),
        Planted("torch", "    if b is not None:\n        y = y + b.float()", "    y = y + b.float()", "raises"),
        Planted("torch", "return y.to(x.dtype)", "return y", "type"),
        Planted("torch", "xf.mean(-1, keepdim=True)", "xf.mean()", "formula|special"),
        Planted("torch", "y + b.float()", "y - b.float()", "sign|formula"),
        Planted("triton", "tl.where(inside, v - mean, 0.0)", "v - mean", "formula|tail|factor"),
        Planted("triton", "mean = tl.sum(v, 0) / N", "mean = tl.sum(v, 0) / BLOCK", "formula|tail"),
        Planted("triton", "row * N + column, out", "row * N + column, v", "formula|stride"),
    ),
)  # fmt: skip
