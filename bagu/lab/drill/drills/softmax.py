"""Softmax over rows, with a scale, a mask and lengths."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text
from bagu.lab.drill.snippets import BLOCK_REDUCE

TORCH = """import torch


def forward(x, scale, mask, lengths):
    s = x.float() * scale
    keep = torch.ones(x.shape, dtype=torch.bool)
    if mask is not None:
        keep = keep & mask
    if lengths is not None:
        keep = keep & (torch.arange(x.shape[-1]) < lengths[..., None])
    s = torch.where(keep, s, -torch.inf)
    top = s.amax(-1, keepdim=True)
    e = torch.exp(s - top)
    y = e / e.sum(-1, keepdim=True)
    return torch.where(keep, y, 0.0).to(x.dtype)
"""
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, y, mask, lengths, scale, N, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    keep = inside
    if HAS_MASK:
        keep = keep & (tl.load(mask + row * N + column, mask=inside, other=0) != 0)
    if HAS_LENGTHS:
        keep = keep & (column < tl.load(lengths + row))
    v = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32) * scale
    v = tl.where(keep, v, -float("inf"))
    top = tl.max(v, 0)
    e = tl.exp(v - top)
    out = tl.where(keep, e / tl.sum(tl.where(keep, e, 0.0), 0), 0.0)
    nan = tl.sum(tl.where(keep & (v != v), 1, 0), 0) > 0
    out = tl.where(keep & nan, float("nan"), out)
    tl.store(y + row * N + column, out.to(y.dtype.element_ty), mask=inside)


def forward(x, scale, mask, lengths):
    x = x.contiguous()
    N = x.shape[-1]
    y = torch.empty_like(x)
    rows = x.numel() // N if N else 0
    if rows:
        m = mask.contiguous() if mask is not None else x
        n = lengths.contiguous() if lengths is not None else x
        kernel[(rows,)](x, y, m, n, scale, N, mask is not None, lengths is not None, triton.next_power_of_2(N))
    return y
"""

TRITON_GRAD = (
    TRITON
    + """

@triton.jit
def slope(dy, x, dx, mask, lengths, scale, N, HAS_MASK: tl.constexpr, HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    keep = inside
    if HAS_MASK:
        keep = keep & (tl.load(mask + row * N + column, mask=inside, other=0) != 0)
    if HAS_LENGTHS:
        keep = keep & (column < tl.load(lengths + row))
    v = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32) * scale
    v = tl.where(keep, v, -float("inf"))
    e = tl.exp(v - tl.max(v, 0))
    y = tl.where(keep, e / tl.sum(tl.where(keep, e, 0.0), 0), 0.0)
    d = tl.load(dy + row * N + column, mask=keep, other=0.0).to(tl.float32)
    out = scale * y * (d - tl.sum(d * y, 0))
    tl.store(dx + row * N + column, tl.where(y != 0, out, 0.0).to(dx.dtype.element_ty), mask=inside)


def backward(dy, x, scale, mask, lengths):
    dy, x = dy.contiguous(), x.contiguous()
    dx, N = torch.empty_like(x), x.shape[-1]
    if x.numel():
        m = mask.contiguous() if mask is not None else x
        n = lengths.contiguous() if lengths is not None else x
        has = mask is not None, lengths is not None
        slope[(x.numel() // N,)](dy, x, dx, m, n, scale, N, *has, triton.next_power_of_2(N))
    return dx
"""
)
CUDA = (
    "// launch: M, 256"
    + BLOCK_REDUCE
    + """
extern "C" __global__ void kernel(
    const float* x, float scale, const unsigned char* mask, const long long* lengths, float* y, long long M,
    long long N) {
    long long row = blockIdx.x;
    x += row * N, y += row * N, mask += mask ? row * N : 0;
    long long end = lengths && lengths[row] < N ? lengths[row] : N;
    float top = -3.402823466e38f, total = 0.0f;
    for (long long i = threadIdx.x; i < end; i += blockDim.x)
        if (!mask || mask[i]) top = fmaxf(top, scale * x[i]);
    top = reduced(top, true);
    for (long long i = threadIdx.x; i < end; i += blockDim.x)
        if (!mask || mask[i]) total += expf(scale * x[i] - top);
    total = reduced(total, false);
    for (long long i = threadIdx.x; i < N; i += blockDim.x)
        y[i] = i < end && (!mask || mask[i]) ? expf(scale * x[i] - top) / total : 0.0f;
}
"""
)

DRILL = Drill.of(
    "softmax",
    difficulty=2,
    title=Text("softmax of rows", "按行 softmax"),
    task_zh="把每一行分数变成和为一的正权重；支持 scale、mask 与 lengths。没有可见列的行全为零。",
    forbidden=("_softmax", "softmax", "_safe_softmax", "log_softmax", "_log_softmax", "logsumexp"),
    solutions={"torch": TORCH, "triton": TRITON, "triton_grad": TRITON_GRAD, "cuda": CUDA},
    hints=(
        Text("exp grows fast: what happens to a score of 1,000?", "exp 增长很快：分数为 1000 时会怎样？"),
        Text(
            "Subtract the maximum of the visible columns; hidden columns are -inf before it and 0 after the division.",
            "减去可见列的最大值；隐藏列在此之前为 -inf，除法之后为 0。",
        ),
        Text(
            "A row without visible columns is 0 / 0: select 0 by the mask at the end, not by the values.",
            "没有可见列的行是 0/0：最后按 mask 选 0，而不是按数值判断。",
        ),
    ),
    questions=(
        Question(
            "How many passes over a row does a stable softmax need, and how does an online one save one?",
            "稳定的 softmax 需要读几遍？online softmax 如何少读一遍？",
            "bagu lab run online_softmax",
        ),
        Question("Is it bound by memory or by compute?", "它受限于带宽还是算力？", "bagu ops show softmax"),
    ),
    planted=(
        Planted("torch", "torch.exp(s - top)", "torch.exp(s)", "overflow"),
        Planted("torch", "x.float() * scale", "x.float()", "ignored"),
        Planted("torch", "keep = keep & mask", "keep = keep", "mask"),
        Planted("torch", "< lengths[..., None])", "<= lengths[..., None])", "mask|off_by_one"),
        Planted("torch", "return torch.where(keep, y, 0.0).to(x.dtype)", "return y.to(x.dtype)", "special"),
        Planted("torch", "e / e.sum(-1, keepdim=True)", "e", "normalize"),
        Planted("torch", "torch.where(keep, y, 0.0).to(x.dtype)", "torch.where(keep, y, 0.0)", "type"),
        Planted("torch", "s = x.float() * scale", "s = (x.float() * scale).bfloat16().float()", "precision"),
        Planted("torch", "s.amax(-1, keepdim=True)", "s.amax()", "overflow|special|raises"),
        Planted("torch", "torch.where(keep, y, 0.0)", "torch.where(keep, y.nan_to_num(0.0), 0.0)", "special"),
        Planted("torch", "torch.where(keep, s, -torch.inf)", "torch.where(keep, s, -1e4)", "special|overflow"),
        Planted("triton", "inside = column < N", "inside = column < N - 1", "tail"),
        Planted("triton", "row * N + column, out", "row * BLOCK + column, out", "stride|rows|dies|unwritten"),
        Planted("triton", "x = x.contiguous()", "x = x", "stride"),
        Planted("triton", "kernel[(rows,)]", "kernel[(max(1, rows - 1),)]", "rows|unwritten"),
        Planted("triton", "column < tl.load(lengths", "column <= tl.load(lengths", "mask|off_by_one"),
        Planted("cuda", "expf(scale * x[i] - top)", "expf(scale * x[i])", "overflow|normalize|formula"),
        Planted("cuda", "lengths && lengths[row] < N ? lengths[row] : N", "N", "mask"),
        Planted("cuda", "if (!mask || mask[i]) total", "total", "mask|normalize|formula|unwritten"),
        Planted("cuda", "i < N; i", "i < end; i", "unwritten|overflow"),
        Planted("cuda", "i += blockDim.x)\n        y", "i += 2 * blockDim.x)\n        y", "unwritten|tail|overflow"),
        Planted("triton_grad", "(d - tl.sum(d * y, 0))", "(d + tl.sum(d * y, 0))", "sign|formula"),
        Planted("triton_grad", "(d - tl.sum(d * y, 0))", "d", "formula"),
        Planted("triton_grad", "out = scale * y *", "out = y *", "ignored|factor"),
        Planted("triton_grad", "tl.sum(d * y, 0)", "tl.sum(d, 0)", "formula"),
        Planted("triton_grad", "tl.sum(d * y, 0)", "tl.sum(d * y, 0) / N", "formula"),
        Planted(
            "triton_grad", "dy, x = dy.contiguous(), x.contiguous()\n    dx", "x = x.contiguous()\n    dx", "stride"
        ),
    ),
)
