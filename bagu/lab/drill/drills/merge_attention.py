"""Merge two partial attentions by their lse."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Merge two partial results of attention, over different keys of the same queries (split KV, ring attention).

merge(out1, lse1, out2, lse2) -> (out, lse)
    out1, out2 [T, D]      lse1, lse2 [T]: the log of the sum of exp of the scores of its keys; -inf if it saw none

The result is what attention over all the keys gives. lse may be in the thousands; logaddexp is not allowed.
"""

import torch


def merge(out1, lse1, out2, lse2):
    raise NotImplementedError
'''
SOLUTION = """import torch


def merge(out1, lse1, out2, lse2):
    top = torch.maximum(lse1, lse2)
    safe = torch.where(top == -torch.inf, 0.0, top)
    w1, w2 = torch.exp(lse1 - safe), torch.exp(lse2 - safe)
    total = w1 + w2
    some = total > 0
    total = torch.where(some, total, 1.0)
    out = (w1[:, None] * out1 + w2[:, None] * out2) / total[:, None]
    lse = torch.where(some, safe + total.log(), -torch.inf)
    return out, lse
"""

DRILL = Drill(
    name="merge_attention",
    topic="model",
    difficulty=2,
    title=Text("merge two attentions by lse", "用 lse 合并两段注意力"),
    task=Text(STUB.split('"""')[1], "用 lse 合并对不同 key 的两段注意力（split KV、环形注意力）；没有 key 的一段 lse 为 -inf。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="decoding",
    functions=("merge",),
    forbidden=("logaddexp", "logsumexp", "logcumsumexp"),
    hints=(
        Text("exp(lse) is the weight of a part.", "exp(lse) 就是一段的权重。"),
        Text("Subtract the larger lse before exp, and add it back to the result's.", "先减去较大的 lse 再取 exp，最后加回来。"),
        Text("If both are -inf, subtract 0 instead: weights are 0, the total is 0, out = 0 and lse = -inf.", "若都为 -inf，则减 0：权重与总和为 0，out = 0，lse = -inf。"),
    ),
    questions=(
        Question("Where does a paged decode split its keys?", "分页解码在哪里切分 key？", "bagu ops show paged_attention"),
        Question("Is the merge associative?", "合并满足结合律吗？", "bagu lab list --theme parallel"),
    ),
    planted=(
        Planted("torch", "w1, w2 = torch.exp(lse1 - safe), torch.exp(lse2 - safe)", "w1, w2 = torch.exp(lse1), torch.exp(lse2)", "overflow|formula"),
        Planted("torch", "safe = torch.where(top == -torch.inf, 0.0, top)", "safe = top", "special"),
        Planted("torch", "(w1[:, None] * out1 + w2[:, None] * out2) / total[:, None]", "(out1 + out2) / 2", "normalize|formula"),
        Planted("torch", " / total[:, None]", "", "normalize|formula|factor"),
        Planted("torch", "safe + total.log()", "total.log()", "formula"),
        Planted("torch", "safe + total.log()", "safe", "formula"),
        Planted("torch", "total = w1 + w2", "total = w1", "formula"),
        Planted("torch", "w1[:, None] * out1 + w2[:, None] * out2", "w2[:, None] * out1 + w1[:, None] * out2", "order|formula"),
        Planted("torch", "torch.maximum(lse1, lse2)", "lse1", "overflow|special"),
        Planted("torch", "    total = torch.where(some, total, 1.0)\n", "", "special"),
        Planted("torch", "torch.where(some, safe + total.log(), -torch.inf)", "safe + total.log()", "special"),
        Planted("torch", "return out, lse", "return out, lse.exp()", "formula"),
        Planted("torch", "return out, lse", "return out", "type"),
    ),
)  # fmt: skip
