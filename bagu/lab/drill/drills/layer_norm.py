"""LayerNorm."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text
from bagu.lab.drill.snippets import ADD_ROWS, BLOCK_REDUCE

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

TRITON_GRAD = (
    TRITON
    + """

@triton.jit
def slope(dy, x, w, dx, parts, M, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    v = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * N + column, mask=inside, other=0.0).to(tl.float32)
    g = d * tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    c = tl.where(inside, v - tl.sum(v, 0) / N, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(c * c, 0) / N + eps)
    h = c * r
    out = r * (g - tl.sum(g, 0) / N - h * (tl.sum(g * h, 0) / N))
    tl.store(dx + row * N + column, out.to(dx.dtype.element_ty), mask=inside)
    tl.store(parts + row * N + column, d * h, mask=inside)
    tl.store(parts + (M + row) * N + column, d, mask=inside)
"""
    + ADD_ROWS
    + """

def backward(dy, x, w, b, eps):
    dy, x, w = dy.contiguous(), x.contiguous(), w.contiguous()
    dx, dw, db = torch.empty_like(x), torch.zeros_like(w), None if b is None else torch.zeros_like(b)
    N = x.shape[-1]
    rows = x.numel() // N if N else 0
    if rows:
        parts = torch.empty((2, rows, N), dtype=torch.float32, device=x.device)
        slope[(rows,)](dy, x, w, dx, parts, rows, N, eps, triton.next_power_of_2(N))
        for total, part in ((dw, parts[0]), (db, parts[1])):
            if total is not None:
                add_rows[(triton.cdiv(N, 128),)](part, total, rows, N, 128)
    return dx, dw, db
"""
)
CUDA = (
    "// launch: M, 256"
    + BLOCK_REDUCE
    + """
extern "C" __global__ void kernel(
    const float* x, const float* w, const float* b, float eps, float* y, long long M, long long N) {
    x += blockIdx.x * N, y += blockIdx.x * N;
    float total = 0.0f, squares = 0.0f;
    for (long long i = threadIdx.x; i < N; i += blockDim.x) total += x[i];
    float mean = reduced(total, false) / N;
    for (long long i = threadIdx.x; i < N; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
    float r = 1.0f / sqrtf(reduced(squares, false) / N + eps);
    for (long long i = threadIdx.x; i < N; i += blockDim.x) y[i] = (x[i] - mean) * r * w[i] + (b ? b[i] : 0.0f);
}
"""
)

DRILL = Drill.of(
    "layer_norm",
    difficulty=2,
    title=Text("LayerNorm", "LayerNorm"),
    task_zh="把每一行归一到零均值、单位方差，再按特征缩放和平移。",
    forbidden=("native_layer_norm", "torch.nn.functional.layer_norm", "torch.layer_norm", "var", "var_mean", "std", "std_mean"),
    solutions={"torch": TORCH, "triton": TRITON, "triton_grad": TRITON_GRAD, "cuda": CUDA},
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
        Planted("cuda", " / N + eps)", " / (N - 1) + eps)", "off_by_one|formula|special"),
        Planted("cuda", "+ (b ? b[i] : 0.0f)", "", "ignored"),
        Planted("cuda", "squares += (x[i] - mean) * (x[i] - mean)", "squares += x[i] * x[i]", "formula|precision"),
        Planted("cuda", "(b ? b[i] : 0.0f)", "b[i]", "dies"),
        Planted("cuda", "i < N; i += blockDim.x) total", "i < N - 1; i += blockDim.x) total", "tail|formula"),
        Planted("triton_grad", "g - tl.sum(g, 0) / N - h", "g - h", "formula"),
        Planted("triton_grad", "- h * (tl.sum(g * h, 0) / N)", "+ h * (tl.sum(g * h, 0) / N)", "sign|formula"),
        Planted("triton_grad", "- h * (tl.sum(g * h, 0) / N)", "", "formula"),
        Planted("triton_grad", "c = tl.where(inside, v - tl.sum(v, 0) / N, 0.0)\n    r = 1.0 / tl.sqrt(tl.sum(c * c, 0) / N + eps)\n    h", "c = v - tl.sum(v, 0) / N\n    r = 1.0 / tl.sqrt(tl.sum(c * c, 0) / N + eps)\n    h", "formula|tail"),
        Planted("triton_grad", "(db, parts[1])", "(db, parts[0])", "formula"),
        Planted("triton_grad", "range(0, M)", "range(0, M - 1)", "formula|special"),
    ),
)  # fmt: skip
