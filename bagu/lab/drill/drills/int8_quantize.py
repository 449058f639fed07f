"""Quantize rows to int8."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Symmetric int8 quantization, one scale per row.

quantize(x) -> (q, scale)
    x [M, N] fp64      q [M, N] int8 in -127 … 127      scale [M] fp64

scale is the largest magnitude of the row divided by 127; a row of zeros has scale 1. q is x / scale, rounded to the
nearest integer, halves to even.
"""

import torch


def quantize(x):
    raise NotImplementedError
'''
SOLUTION = """import torch


def quantize(x):
    scale = x.abs().amax(-1) / 127
    scale = torch.where(scale == 0, 1.0, scale)
    q = torch.round(x / scale[:, None]).clamp(-127, 127)
    return q.to(torch.int8), scale
"""

DRILL = Drill(
    name="int8_quantize",
    topic="serving",
    difficulty=1,
    title=Text("int8 quantization by rows", "按行 int8 量化"),
    task=Text(STUB.split('"""')[1], "对称 int8 量化，每行一个 scale；全零行的 scale 为 1，恰好一半时取偶。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="decoding",
    functions=("quantize",),
    forbidden=("quantize_per_channel", "quantize_per_tensor", "fake_quantize_per_channel_affine"),
    hints=(
        Text("int8 has one more negative value than positive ones: is it needed?", "int8 的负数多一个：需要它吗？"),
        Text("The scale comes from the largest magnitude, not the largest value.", "scale 来自最大的绝对值，而不是最大值。"),
        Text("Round before the cast: a cast cuts towards zero. Replace a scale of 0 by 1.", "先舍入再转换：直接转换是截断。scale 为 0 时换成 1。"),
    ),
    questions=(
        Question("What does one outlier do to its row?", "一个离群值会怎样影响整行？", "bagu lab run quantization_error"),
        Question("Per tensor, per row or per group?", "按张量、按行还是按组？", "bagu lab run quantization_quality"),
    ),
    planted=(
        Planted("torch", "x.abs().amax(-1)", "x.amax(-1)", "sign"),
        Planted("torch", "x.abs().amax(-1) / 127", "x.abs().amax().expand(x.shape[0]) / 127", "rows|formula|raises"),
        Planted("torch", "/ 127", "/ 128", "factor"),
        Planted("torch", "torch.round(x / scale[:, None])", "(x / scale[:, None])", "formula"),
        Planted("torch", "torch.round(x / scale[:, None])", "torch.floor(x / scale[:, None] + 0.5)", "ties"),
        Planted("torch", "    scale = torch.where(scale == 0, 1.0, scale)\n", "", "special"),
        Planted("torch", "torch.where(scale == 0, 1.0, scale)", "scale + 1e-8", "special|precision"),
        Planted("torch", ".to(torch.int8)", "", "type"),
        Planted("torch", ".amax(-1)", ".amax(0)", "raises|formula|type"),
        Planted("torch", "x / scale[:, None]", "x * scale[:, None]", "formula"),
        Planted("torch", "return q.to(torch.int8), scale", "return q.to(torch.int8), 1 / scale", "formula"),
        Planted("torch", "return q.to(torch.int8), scale", "return q.to(torch.int8), scale.float()", "type"),
        Planted("torch", "x.abs().amax(-1) / 127", "x.square().mean(-1).sqrt() / 127", "formula"),
        Planted("torch", "return q.to(torch.int8), scale", "return q.to(torch.int8), scale[:, None]", "type"),
    ),
)  # fmt: skip
