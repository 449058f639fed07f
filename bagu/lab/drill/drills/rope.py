"""Rotary position embedding."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

TORCH = """import torch


def forward(x, cos, sin, positions, layout):
    R = cos.shape[1]
    p = torch.arange(x.shape[-3]) if positions is None else positions
    c, s = cos[p].float().unsqueeze(-2), sin[p].float().unsqueeze(-2)
    y = x.clone()
    if layout == "half":
        a, b = slice(0, R), slice(R, 2 * R)
    else:
        a, b = slice(0, 2 * R, 2), slice(1, 2 * R, 2)
    left, right = x[..., a].float(), x[..., b].float()
    y[..., a] = (left * c - right * s).to(x.dtype)
    y[..., b] = (right * c + left * s).to(x.dtype)
    return y
"""
TRITON = """import torch
import triton
import triton.language as tl


@triton.jit
def kernel(x, cos, sin, positions, y, T, H, D, R, sign, HAS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # a token's head
    token = row // H
    p = tl.load(positions + token).to(tl.int64) if HAS else token % T
    d = tl.arange(0, BLOCK)
    inside = d < D
    turned = d < 2 * R
    if HALF:
        pair, first = d % R, d < R
        other = tl.where(first, d + R, d - R)
    else:
        pair, first = d // 2, d % 2 == 0
        other = tl.where(first, d + 1, d - 1)
    v = tl.load(x + row * D + d, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(x + row * D + other, mask=turned, other=0.0).to(tl.float32)
    c = tl.load(cos + p * R + pair, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + p * R + pair, mask=turned, other=0.0).to(tl.float32) * sign
    out = tl.where(turned, v * c + tl.where(first, -o, o) * s, v)
    tl.store(y + row * D + d, out.to(y.dtype.element_ty), mask=inside)


def rotate(x, cos, sin, positions, layout, sign):
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    *_, T, H, D = x.shape
    y = torch.empty_like(x)
    if x.numel():
        p = x if positions is None else positions.contiguous()
        half, block = layout == "half", triton.next_power_of_2(D)
        has, R = positions is not None, cos.shape[1]
        kernel[(x.numel() // D,)](x, cos, sin, p, y, T, H, D, R, sign, has, half, block)
    return y


def forward(x, cos, sin, positions, layout):
    return rotate(x, cos, sin, positions, layout, 1.0)
"""
TRITON_GRAD = (
    TRITON
    + """

def backward(dy, x, cos, sin, positions, layout):
    return rotate(dy, cos, sin, positions, layout, -1.0)  # a rotation back
"""
)

DRILL = Drill.of(
    "rope",
    difficulty=2,
    title=Text("rotary position embedding", "旋转位置编码 RoPE"),
    task_zh="按词元位置旋转每一对特征；half 与 interleaved 两种排列；2R 之后的特征不变。",
    forbidden=("view_as_complex", "polar"),
    solutions={"torch": TORCH, "triton": TRITON, "triton_grad": TRITON_GRAD},
    hints=(
        Text("A pair of features is a point in the plane.", "一对特征是平面上的一个点。"),
        Text("half pairs feature r with r + R; interleaved pairs 2r with 2r + 1. Features from 2R on stay.", "half：r 与 r+R 配对；interleaved：2r 与 2r+1 配对；2R 之后不变。"),
        Text("a' = a cos - b sin, b' = b cos + a sin: both from the old a and b, in fp32, rounded once.", "a' = a·cos - b·sin，b' = b·cos + a·sin：都用旧的 a、b，在 fp32 中计算，只舍入一次。"),
    ),
    questions=(
        Question("Why does the product of two rotated vectors depend on their distance only?", "为什么旋转后的内积只依赖距离？", "bagu lab run positions"),
        Question("What does YaRN change?", "YaRN 改了什么？", "bagu lab list --long"),
    ),
    planted=(
        Planted("torch", "left * c - right * s", "left * c + right * s", "sign|formula"),
        Planted("torch", "right * c + left * s", "right * c - left * s", "sign|formula"),
        Planted("torch", "slice(0, 2 * R, 2), slice(1, 2 * R, 2)", "slice(0, R), slice(R, 2 * R)", "ignored"),
        Planted("torch", "if layout == \"half\":", "if layout != \"half\":", "ignored"),
        Planted("torch", "torch.arange(x.shape[-3]) if positions is None else positions", "torch.arange(x.shape[-3])", "ignored|raises"),
        Planted("torch", "cos[p].float().unsqueeze(-2), sin[p].float().unsqueeze(-2)", "sin[p].float().unsqueeze(-2), cos[p].float().unsqueeze(-2)", "order"),
        Planted("torch", "torch.arange(x.shape[-3])", "torch.arange(x.shape[-3]) + 1", "raises|off_by_one"),
        Planted("torch", "left, right = x[..., a].float(), x[..., b].float()", "left, right = x[..., a], x[..., b].to(x.dtype)\n    c, s = c.to(x.dtype), s.to(x.dtype)", "precision|formula"),
        Planted("torch", "(right * c + left * s)", "(right * c + y[..., a].float() * s)", "formula|stale"),
        Planted("torch", "y = x.clone()", "y = torch.zeros_like(x)", "formula|edge|tail"),
        Planted("torch", "y = x.clone()", "y = x", "changes_input"),
        Planted("torch", "R = cos.shape[1]", "R = x.shape[-1] // 2", "raises|formula"),
        Planted("triton", "token % T", "token", "rows|formula|dies"),
        Planted("triton", "token = row // H", "token = row", "rows|formula|dies"),
        Planted("triton", "tl.where(first, -o, o)", "o", "sign|formula"),
        Planted("triton_grad", "positions, layout, -1.0)", "positions, layout, 1.0)", "sign|formula"),
        Planted("triton_grad", "return rotate(dy, cos, sin, positions, layout, -1.0)", "return rotate(x, cos, sin, positions, layout, -1.0)", "formula|ignored"),
        Planted("triton_grad", "rotate(dy, cos, sin, positions", "rotate(dy, cos, sin, None", "ignored|formula"),
        Planted("triton_grad", "return rotate(dy, cos", "return rotate(dy, sin", "order|formula|raises"),
        Planted("triton_grad", "-1.0)  # a", "-0.5)  # a", "formula|factor"),
    ),
)  # fmt: skip
