"""Temperature, top-k and top-p."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Sampling the next token with temperature, top-k and top-p.

distribution(logits, temperature, top_k, top_p) -> p[V] in fp64
    1. temperature 0: all mass on the largest logit (the first of equal ones); else divide the logits by it
    2. keep the top_k largest (0: all; of equal ones the first), and renormalise
    3. keep the smallest set of most likely tokens whose mass is at least top_p (at least one token), and renormalise

draw(logits, temperature, top_k, top_p, count) -> int64[count]
    that many independent draws, with torch's random numbers. 10^5 draws are tested.
"""

import torch


def distribution(logits, temperature, top_k, top_p):
    raise NotImplementedError


def draw(logits, temperature, top_k, top_p, count):
    raise NotImplementedError
'''
SOLUTION = """import torch


def distribution(logits, temperature, top_k, top_p):
    x = logits.double()
    p = torch.zeros_like(x)
    if temperature == 0:
        p[x.argmax()] = 1.0
        return p
    x = x / temperature
    order = torch.argsort(x, descending=True, stable=True)
    kept = order[:top_k] if top_k else order
    e = torch.exp(x[kept] - x[kept].max())
    e = e / e.sum()
    if top_p < 1:
        before = e.cumsum(0) - e
        inside = before < top_p
        inside[0] = True
        kept, e = kept[inside], e[inside]
    p[kept] = e / e.sum()
    return p


def draw(logits, temperature, top_k, top_p, count):
    p = distribution(logits, temperature, top_k, top_p)
    edges = p.cumsum(0)
    u = torch.rand(count, dtype=torch.float64) * edges[-1]
    tokens = torch.searchsorted(edges, u, right=True)
    return tokens.clamp(max=int(p.nonzero().max()))
"""

DRILL = Drill(
    name="sampling",
    topic="decoding",
    difficulty=3,
    title=Text("temperature, top-k and top-p sampling", "温度、top-k、top-p 采样"),
    task=Text(STUB.split('"""')[1], "写出带温度、top-k、top-p 的采样：先给出精确分布，再按它抽样（检验 10 万次抽样）。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="decoding",
    functions=("distribution", "draw"),
    forbidden=("multinomial",),
    hints=(
        Text("The set of top-p contains the token that crosses the mass.", "top-p 的集合包含跨过阈值的那个词。"),
        Text("Sort once, keep k, renormalise, then look at the mass before each token.", "排序一次，取 k 个，归一化，再看每个词之前的累计质量。"),
        Text("Keep token i if the mass before it is below p; always keep the first. Draw by the inverse of the cumulative sum.", "之前的质量小于 p 就保留；第一个总保留。用累积分布的逆来抽样。"),
    ),
    questions=(
        Question("Why is an argmax of logits + Gumbel noise a sample?", "为什么 logits 加 Gumbel 噪声取 argmax 就是采样？", "bagu ops show sample"),
        Question("What does speculative decoding do to the law?", "投机解码会改变分布吗？", "bagu lab list --theme serve"),
    ),
    planted=(
        Planted("torch", "x = x / temperature", "x = x * temperature", "factor|formula"),
        Planted("torch", "order[:top_k] if top_k else order", "order", "ignored"),
        Planted("torch", "order[:top_k] if top_k else order", "order[:top_k]", "edge|raises|special|formula"),
        Planted("torch", "before = e.cumsum(0) - e", "before = e.cumsum(0)", "off_by_one"),
        Planted("torch", "        inside[0] = True\n", "", "edge|special"),
        Planted("torch", "    e = e / e.sum()\n", "", "formula|normalize"),
        Planted("torch", "p[kept] = e / e.sum()", "p[kept] = e", "normalize|formula|factor"),
        Planted("torch", "    if temperature == 0:\n        p[x.argmax()] = 1.0\n        return p\n", "", "edge|special|raises|overflow"),
        Planted("torch", "descending=True, stable=True", "descending=False, stable=True", "order|formula"),
        Planted("torch", "torch.argsort(x, descending=True, stable=True)", "torch.argsort(x.flip(0), descending=True, stable=True).neg() + len(x) - 1", "ties"),
        Planted("torch", "torch.rand(count, dtype=torch.float64) * edges[-1]", "torch.rand(count, dtype=torch.float64).sqrt() * edges[-1]", "mass"),
        Planted("torch", "torch.searchsorted(edges, u, right=True)", "torch.searchsorted(edges, u) + 1", "mass"),
        Planted("torch", "    p = distribution(logits, temperature, top_k, top_p)\n    edges", "    p = distribution(logits, temperature, top_k, 1.0)\n    edges", "mass"),
        Planted("torch", "torch.rand(count, dtype=torch.float64) * edges[-1]", "torch.rand(1, dtype=torch.float64).expand(count) * edges[-1]", "mass"),
    ),
)  # fmt: skip
