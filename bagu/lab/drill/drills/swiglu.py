"""SwiGLU."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

TORCH = """import torch


def forward(x, up):
    if up is None:
        N = x.shape[-1] // 2
        gate, up = x[..., :N].float(), x[..., N:].float()
    else:
        gate, up = x.float(), up.float()
    y = gate / (1 + torch.exp(-gate)) * up
    y = torch.where(gate == -torch.inf, torch.nan, y)
    return y.to(x.dtype)
"""
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(gate, up, y, n, N, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    source = at // N * stride + at % N
    g = tl.load(gate + source, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + source, mask=inside, other=0.0).to(tl.float32)
    out = g / (1.0 + tl.exp(-g)) * u
    out = tl.where(g == -float("inf"), float("nan"), out)
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


def forward(x, up):
    x = x.contiguous()
    N = x.shape[-1] // 2 if up is None else x.shape[-1]
    y = torch.empty((*x.shape[:-1], N), dtype=x.dtype, device=x.device)
    if y.numel():
        flat = x.view(-1)
        second = flat[N:] if up is None else up.contiguous()
        kernel[(triton.cdiv(y.numel(), 1024),)](flat, second, y, y.numel(), N, x.shape[-1], 1024)
    return y
"""
TRITON_GRAD = (
    TRITON
    + """

@triton.jit
def slope(dy, gate, up, dgate, dup, n, N, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    source = at // N * stride + at % N
    d = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + source, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + source, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    tl.store(dgate + source, (d * u * s * (1.0 + g * (1.0 - s))).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + source, (d * g * s).to(dup.dtype.element_ty), mask=inside)


def backward(dy, x, up):
    dy, x = dy.contiguous(), x.contiguous()
    N = dy.shape[-1]
    dx, dup = torch.empty_like(x), None if up is None else torch.empty(up.shape, dtype=up.dtype, device=up.device)
    if dy.numel():
        second, into = (x.view(-1)[N:], dx.view(-1)[N:]) if up is None else (up.contiguous(), dup)
        slope[(triton.cdiv(dy.numel(), 1024),)](dy, x, second, dx, into, dy.numel(), N, x.shape[-1], 1024)
    return dx, dup
"""
)

DRILL = Drill.of(
    "swiglu",
    difficulty=1,
    title=Text("SwiGLU", "SwiGLU"),
    task_zh="门控线性单元：y = silu(gate)·up；x 里 gate 在前、up 在后，或 up 单独传入。",
    forbidden=("silu", "sigmoid", "glu", "torch.nn.functional.silu"),
    solutions={"torch": TORCH, "triton": TRITON, "triton_grad": TRITON_GRAD},
    hints=(
        Text("silu(g) = g * sigmoid(g): what does sigmoid need when g is -100?", "silu(g) = g·sigmoid(g)：g = -100 时 sigmoid 会怎样？"),
        Text("g / (1 + exp(-g)) is safe on both sides: exp may overflow to inf, and g / inf is 0.", "g/(1+exp(-g)) 两侧都安全：exp 溢出为 inf，g/inf = 0。"),
        Text("x packs gate first: the up half of a row begins N elements after the gate half. Compute in fp32 and round once.", "x 中 gate 在前：两半相距 N。用 fp32 计算，只舍入一次。"),
    ),
    questions=(
        Question("Why is the hidden size of a SwiGLU FFN 8/3 of the model's?", "为什么 SwiGLU 的隐层是 8/3 倍？", "bagu lab run flop_rules"),
        Question("What bounds it?", "它受什么限制？", "bagu ops show swiglu"),
    ),
    planted=(
        Planted("torch", "gate / (1 + torch.exp(-gate)) * up", "up / (1 + torch.exp(-up)) * gate", "order"),
        Planted("torch", "gate / (1 + torch.exp(-gate)) * up", "1 / (1 + torch.exp(-gate)) * up", "formula"),
        Planted("torch", "gate / (1 + torch.exp(-gate)) * up", "gate.clamp(min=0) * up", "factor|formula"),
        Planted("torch", "torch.exp(-gate)", "torch.exp(gate)", "sign|formula"),
        Planted("torch", "x[..., :N].float(), x[..., N:].float()", "x[..., N:].float(), x[..., :N].float()", "order"),
        Planted("torch", "x[..., :N].float(), x[..., N:].float()", "x[..., ::2].float(), x[..., 1::2].float()", "order|formula"),
        Planted("torch", "gate, up = x.float(), up.float()", "gate, up = x.float(), 1.0", "ignored|formula"),
        Planted("torch", "gate / (1 + torch.exp(-gate)) * up", "gate * torch.exp(gate) / (1 + torch.exp(gate)) * up", "overflow|special"),
        Planted("torch", "    return y.to(x.dtype)", "    return y", "type"),
        Planted("torch", "gate, up = x[..., :N].float(), x[..., N:].float()", "gate, up = x[..., :N].bfloat16().float(), x[..., N:].float()", "precision"),
        Planted("torch", "(1 + torch.exp(-gate))", "(1 + torch.exp(-1.702 * gate))", "formula|factor"),
        Planted("torch", "y = torch.where(gate == -torch.inf, torch.nan, y)", "y = torch.where(gate.isinf(), 0.0, y)", "special"),
        Planted("triton", "inside = at < n", "inside = at < n - 1", "tail|unwritten"),
        Planted("triton", "at // N * stride + at % N", "at", "rows|formula|ignored"),
        Planted("triton", "triton.cdiv(y.numel(), 1024)", "max(1, y.numel() // 1024)", "tail|unwritten|rows"),
        Planted("triton_grad", "d * u * s * (1.0 + g * (1.0 - s))", "d * u * s", "formula"),
        Planted("triton_grad", "(1.0 + g * (1.0 - s))", "(1.0 - g * (1.0 - s))", "sign|formula"),
        Planted("triton_grad", "d * g * s", "d * s", "formula|ignored"),
        Planted("triton_grad", "d * u * s *", "d * s *", "formula|ignored"),
        Planted("triton_grad", "return dx, dup", "return dx, dx", "type|formula|raises"),
        Planted("triton_grad", "slope[(triton.cdiv(dy.numel(), 1024),)]", "slope[(max(1, dy.numel() // 1024),)]", "unwritten|tail|overflow|rows"),
    ),
)  # fmt: skip
