"""RMSNorm."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text
from bagu.lab.drill.snippets import ADD_ROWS, BLOCK_REDUCE

TORCH = """import torch


def forward(x, w, eps):
    xf = x.float()
    r = torch.rsqrt((xf * xf).mean(-1, keepdim=True) + eps)
    return (xf * r * w.float()).to(x.dtype)
"""
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, w, y, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    v = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(v * v, 0) / N + eps)
    scale = tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * N + column, (v * r * scale).to(y.dtype.element_ty), mask=inside)


def forward(x, w, eps):
    x, w = x.contiguous(), w.contiguous()
    N = x.shape[-1]
    y = torch.empty_like(x)
    rows = x.numel() // N if N else 0
    if rows:
        kernel[(rows,)](x, w, y, N, eps, triton.next_power_of_2(N))
    return y
"""

TRITON_GRAD = (
    TRITON
    + """

@triton.jit
def slope(dy, x, w, dx, parts, N, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    v = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * N + column, mask=inside, other=0.0).to(tl.float32)
    g = d * tl.load(w + column, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(v * v, 0) / N + eps)
    h = v * r
    out = r * (g - h * (tl.sum(g * h, 0) / N))
    tl.store(dx + row * N + column, out.to(dx.dtype.element_ty), mask=inside)
    tl.store(parts + row * N + column, d * h, mask=inside)
"""
    + ADD_ROWS
    + """

def backward(dy, x, w, eps):
    dy, x, w = dy.contiguous(), x.contiguous(), w.contiguous()
    dx, dw = torch.empty_like(x), torch.zeros_like(w)
    N = x.shape[-1]
    rows = x.numel() // N if N else 0
    if rows:
        parts = torch.empty((rows, N), dtype=torch.float32, device=x.device)
        slope[(rows,)](dy, x, w, dx, parts, N, eps, triton.next_power_of_2(N))
        add_rows[(triton.cdiv(N, 128),)](parts, dw, rows, N, 128)
    return dx, dw
"""
)
CUDA = (
    "// launch: M, 256"
    + BLOCK_REDUCE
    + """
extern "C" __global__ void kernel(
    const float* x, const float* w, float eps, float* y, long long M, long long N) {
    x += blockIdx.x * N, y += blockIdx.x * N;
    float squares = 0.0f;
    for (long long i = threadIdx.x; i < N; i += blockDim.x) squares += x[i] * x[i];
    float r = 1.0f / sqrtf(reduced(squares, false) / N + eps);
    for (long long i = threadIdx.x; i < N; i += blockDim.x) y[i] = x[i] * r * w[i];
}
"""
)

DRILL = Drill.of(
    "rms_norm",
    difficulty=1,
    title=Text("RMSNorm", "RMSNorm"),
    task_zh="把每一行归一到均方根为一，再乘以每个特征的权重。",
    forbidden=("torch.nn.functional.rms_norm", "torch.rms_norm", "_fused_rms_norm", "rms_norm", "native_layer_norm"),
    solutions={"torch": TORCH, "triton": TRITON, "triton_grad": TRITON_GRAD, "cuda": CUDA},
    hints=(
        Text("What is the largest x whose square fp16 can hold?", "fp16 能容纳多大的 x 的平方？"),
        Text("Square and sum in fp32; eps is added to the mean square, inside the root.", "在 fp32 中平方求和；eps 加在均方上，在根号内。"),
        Text("r = rsqrt(sum(x * x) / N + eps), with N the true width and not the block's; y = (x * r * w) in x's dtype.",
             "r = rsqrt(sum(x*x)/N + eps)，N 是真实宽度而不是块宽；y = x*r*w，转回 x 的 dtype。"),
    ),
    questions=(
        Question("Why did models drop LayerNorm's mean?", "为什么大模型去掉了 LayerNorm 的均值？", "bagu lab run normalization"),
        Question("How many bytes does it move, and what bounds it?", "它移动多少字节？受什么限制？", "bagu ops show rms_norm"),
    ),
    planted=(
        Planted("torch", ".mean(-1, keepdim=True)", ".sum(-1, keepdim=True)", "factor|formula"),
        Planted("torch", " + eps)", ")", "eps"),
        Planted("torch", "torch.rsqrt((xf * xf).mean(-1, keepdim=True) + eps)", "1 / ((xf * xf).mean(-1, keepdim=True).sqrt() + eps)", "eps"),
        Planted("torch", "xf = x.float()\n", "xf = x.float() - x.float().mean(-1, keepdim=True)\n", "formula"),
        Planted("torch", "xf * r * w.float()", "xf * r", "ignored"),
        Planted("torch", "xf = x.float()", "xf = x", "precision|overflow"),
        Planted("torch", ".mean(-1, keepdim=True)", ".mean(0, keepdim=True)", "formula|empty|type"),
        Planted("torch", ".mean(-1, keepdim=True)", ".mean()", "formula|special"),
        Planted("torch", ".to(x.dtype)", "", "type"),
        Planted("torch", "(xf * xf).mean(-1, keepdim=True)", "((xf * xf).sum(-1, keepdim=True) / (x.shape[-1] - 1))", "off_by_one"),
        Planted("torch", "torch.rsqrt((xf * xf).mean(-1, keepdim=True) + eps)", "torch.sqrt((xf * xf).mean(-1, keepdim=True) + eps)", "formula"),
        Planted("torch", "(xf * r * w.float())", "((xf * r).bfloat16() * w.float())", "precision"),
        Planted("triton", "tl.sum(v * v, 0) / N", "tl.sum(v * v, 0) / BLOCK", "factor|tail|formula"),
        Planted("triton", "other=0.0).to(tl.float32)\n    r", "other=1.0).to(tl.float32)\n    r", "factor|tail|formula"),
        Planted("triton", "x, w = x.contiguous(), w.contiguous()", "w = w.contiguous()", "stride"),
        Planted("triton", "inside = column < N", "inside = column < N - 1", "tail"),
        Planted("cuda", " / N + eps)", " / N)", "eps|special|unwritten|overflow"),
        Planted("cuda", "float r = 1.0f / sqrtf(", "float r = sqrtf(", "formula"),
        Planted("cuda", "* r * w[i]", "* r", "ignored"),
        Planted("cuda", "y += blockIdx.x * N", "y += 0", "unwritten|rows|overflow|formula"),
        Planted("cuda", "reduced(squares, false)", "squares", "formula|tail"),
        Planted("triton_grad", "g - h *", "g + h *", "sign|formula"),
        Planted("triton_grad", "r * (g - h * (tl.sum(g * h, 0) / N))", "r * g", "formula"),
        Planted("triton_grad", "tl.sum(g * h, 0) / N", "tl.sum(g * h, 0)", "formula|factor"),
        Planted("triton_grad", "d * h, mask", "g * h, mask", "formula"),
        Planted("triton_grad", "range(0, M)", "range(0, M - 1)", "formula|special"),
        Planted("triton_grad", "return dx, dw", "return dx, dw.to(torch.float64)", "type"),
    ),
)  # fmt: skip
