"""A KV cache."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Decoding with a KV cache: a model of one attention layer.

class Decoder:
    Decoder(weights)           embed [V, C], position [L, C], wq, wk, wv, wo [C, C]
    prefill(tokens) -> logits [V] after the last token; forgets what was before
    step(token) -> logits [V] after one more token; raises ValueError if position has no row for it

    x[t] = embed[token t] + position[t];  q, k, v = x @ wq, x @ wk, x @ wv
    y[t] = x[t] + softmax(q[t] k[..t] / sqrt(C)) v[..t] @ wo;  logits = y[t] @ embed.T

A step computes one token: keys and values of the earlier ones are kept. FLOPs are counted.
"""

import torch


class Decoder:
    def __init__(self, weights):
        raise NotImplementedError

    def prefill(self, tokens):
        raise NotImplementedError

    def step(self, token):
        raise NotImplementedError
'''
SOLUTION = """import torch


class Decoder:
    def __init__(self, weights):
        self.w = weights
        self.most = weights["position"].shape[0]
        self.keys = weights["position"].new_zeros(weights["position"].shape)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def run(self, tokens):
        w, a, b = self.w, self.length, self.length + len(tokens)
        if b > self.most:
            raise ValueError(f"{b} tokens, and positions for {self.most}")
        x = w["embed"][torch.tensor(tokens)] + w["position"][a:b]
        self.keys[a:b] = x @ w["wk"]
        self.values[a:b] = x @ w["wv"]
        self.length = b
        last = x[-1:]
        s = (last @ w["wq"]) @ self.keys[:b].T / last.shape[1] ** 0.5
        y = last + torch.softmax(s, -1) @ self.values[:b] @ w["wo"]
        return (y @ w["embed"].T)[0]

    def prefill(self, tokens):
        self.length = 0
        return self.run(tokens)

    def step(self, token):
        return self.run([token])
"""

DRILL = Drill(
    name="kv_cache",
    topic="decoding",
    difficulty=3,
    title=Text("a KV cache and greedy decoding", "KV cache 与贪心解码"),
    task=Text(STUB.split('"""')[1], "为一层注意力的模型写带 KV cache 的解码：每步只计算一个词元，会统计 FLOP。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="decoding",
    functions=("Decoder",),
    hints=(
        Text("Which parts of a token's work do later tokens need again?", "后面的词元会再次用到前面词元的哪些结果？"),
        Text("Keep k and v of every token; the query is needed once.", "保留每个词元的 k、v；q 只用一次。"),
        Text("A step appends one row to keys and values at `length`, attends over rows 0 … length, and adds position[length].", "每步在 length 处追加一行 k、v，对 0…length 做注意力，并加上 position[length]。"),
    ),
    questions=(
        Question("How many bytes does the cache of a token take?", "一个词元的缓存占多少字节？", "bagu lab list --theme serve"),
        Question("Why is decoding bound by memory?", "为什么解码受限于带宽？", "bagu lab list --theme serve"),
    ),
    planted=(
        Planted("torch", "w[\"position\"][a:b]", "w[\"position\"][: b - a]", "formula|off_by_one"),
        Planted("torch", "        self.length = 0\n        return self.run(tokens)", "        return self.run(tokens)", "stale"),
        Planted("torch", "/ last.shape[1] ** 0.5", "", "factor|formula"),
        Planted("torch", "self.keys[:b].T", "self.keys.T", "formula|raises|mask"),
        Planted("torch", "self.values[a:b] = x @ w[\"wv\"]", "self.values[a:b] = x @ w[\"wk\"]", "formula"),
        Planted("torch", "y = last + torch", "y = torch", "formula"),
        Planted("torch", "        if b > self.most:\n            raise ValueError(f\"{b} tokens, and positions for {self.most}\")\n", "", "edge|type"),
        Planted("torch", "        self.length = b\n", "", "formula|raises"),
        Planted("torch", "if b > self.most:", "if b >= self.most:", "edge|off_by_one|raises"),
        Planted("torch", "    def step(self, token):\n        return self.run([token])", "    def step(self, token):\n        self.all.append(token)\n        self.length = 0\n        return self.run(self.all)\n\n    def prefill(self, tokens):\n        self.all = list(tokens)\n        self.length = 0\n        return self.run(tokens)", "volume"),
        Planted("torch", "last = x[-1:]", "last = x[:1]", "formula|off_by_one"),
        Planted("torch", "return (y @ w[\"embed\"].T)[0]", "return (y @ w[\"embed\"].T)[0].softmax(-1)", "formula|normalize"),
        Planted("torch", "return (y @ w[\"embed\"].T)[0]", "return y @ w[\"embed\"].T", "type"),
        Planted("torch", "self.keys = weights[\"position\"].new_zeros(weights[\"position\"].shape)", "self.keys = torch.zeros(weights[\"position\"].shape)", "precision|raises|type|formula"),
    ),
)  # fmt: skip
