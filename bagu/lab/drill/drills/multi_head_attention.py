"""Multi-head attention as a module."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Multi-head attention with grouped key heads, a causal mask and padding.

multi_head_attention(x, wq, wk, wv, wo, heads, kv_heads, causal, real) -> y[B, T, C]
    x [B, T, C]      wq [heads * D, C]      wk, wv [kv_heads * D, C]      wo [C, heads * D]
    query head h reads key head h // (heads // kv_heads)
    real [B, T] bool or None: False marks padding, which is never a key
    scores are divided by sqrt(D); a query that sees no key gives 0 before wo

softmax is allowed; torch's attention functions are not.
"""

import torch


def multi_head_attention(x, wq, wk, wv, wo, heads, kv_heads, causal, real):
    raise NotImplementedError
'''
SOLUTION = """import torch


def multi_head_attention(x, wq, wk, wv, wo, heads, kv_heads, causal, real):
    B, T, C = x.shape
    D = wq.shape[0] // heads
    q = (x @ wq.T).view(B, T, heads, D).transpose(1, 2)
    k = (x @ wk.T).view(B, T, kv_heads, D).transpose(1, 2)
    v = (x @ wv.T).view(B, T, kv_heads, D).transpose(1, 2)
    k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
    s = q @ k.transpose(-1, -2) / D**0.5
    seen = torch.ones(B, 1, T, T, dtype=torch.bool)
    if causal:
        seen = seen & torch.ones(T, T, dtype=torch.bool).tril()
    if real is not None:
        seen = seen & real[:, None, None, :]
    p = torch.softmax(torch.where(seen, s, -torch.inf), -1)
    p = torch.where(seen, p, 0.0)
    y = (p @ v).transpose(1, 2).reshape(B, T, heads * D)
    return y @ wo.T
"""

DRILL = Drill(
    name="multi_head_attention",
    topic="model",
    difficulty=3,
    title=Text("multi-head attention with GQA and masks", "多头注意力（GQA 与掩码）"),
    task=Text(STUB.split('"""')[1], "写出多头注意力模块：拆头、合并、GQA、因果掩码与填充掩码；看不到任何 key 的查询输出 0。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="decoding",
    functions=("multi_head_attention",),
    forbidden=("torch.nn.functional.scaled_dot_product_attention", "scaled_dot_product_attention",
               "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_attention_math", "_native_multi_head_attention",
               "torch.nn.functional.multi_head_attention_forward"),
    modules=("torch.nn.modules.activation",),
    hints=(
        Text("Write down the shape after every line.", "写下每一行之后的形状。"),
        Text("view(B, T, heads, D), then transpose: a view to (B, heads, T, D) mixes tokens and heads.", "先 view(B,T,heads,D) 再 transpose：直接 view 成 (B,heads,T,D) 会混淆词和头。"),
        Text("repeat_interleave, not repeat, for grouped keys; mask to -inf, softmax, then 0 where nothing is seen.", "GQA 用 repeat_interleave 而不是 repeat；掩码为 -inf，softmax，再把不可见处置 0。"),
    ),
    questions=(
        Question("How many parameters and FLOPs has the block?", "这一块有多少参数和 FLOP？", "bagu lab run flop_rules"),
        Question("What does GQA save, and where?", "GQA 省了什么？省在哪里？", "bagu lab run attention_kinds"),
    ),
    planted=(
        Planted("torch", " / D**0.5", "", "factor"),
        Planted("torch", " / D**0.5", " / (heads * D) ** 0.5", "factor"),
        Planted("torch", "view(B, T, heads, D).transpose(1, 2)\n    k", "view(B, heads, T, D)\n    k", "formula|order|rows"),
        Planted("torch", "t.repeat_interleave(heads // kv_heads, 1)", "t.repeat(1, heads // kv_heads, 1, 1)", "order"),
        Planted("torch", ".tril()", ".tril(-1)", "off_by_one|special"),
        Planted("torch", ".tril()", ".triu()", "mask|formula|sign"),
        Planted("torch", "if causal:", "if False:", "mask"),
        Planted("torch", "if real is not None:", "if False:", "mask"),
        Planted("torch", "real[:, None, None, :]", "real[:, None, :, None]", "mask|formula|special"),
        Planted("torch", "    p = torch.where(seen, p, 0.0)\n", "", "special"),
        Planted("torch", "(p @ v).transpose(1, 2).reshape", "(p @ v).reshape", "formula|order|rows"),
        Planted("torch", "return y @ wo.T", "return y @ wo", "formula|raises|order"),
        Planted("torch", "torch.softmax(torch.where(seen, s, -torch.inf), -1)", "torch.softmax(torch.where(seen, s, -torch.inf), -2)", "formula"),
        Planted("torch", "torch.where(seen, s, -torch.inf)", "torch.where(seen, s, 0.0)", "mask|formula"),
    ),
)  # fmt: skip
