"""AdamW."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""AdamW, without torch.optim.

adamw(p, grads, lr, beta1, beta2, eps, decay) -> list of the parameters after each step
    p       [N], the parameters at the start; unchanged
    grads   a list of gradients [N], one per step
    decay   decoupled weight decay: each step also multiplies the parameters by 1 - lr * decay

Moments start at 0 and are corrected for it; eps is added to the root.
"""

import torch


def adamw(p, grads, lr, beta1, beta2, eps, decay):
    raise NotImplementedError
'''
SOLUTION = """import torch


def adamw(p, grads, lr, beta1, beta2, eps, decay):
    m, v, out = torch.zeros_like(p), torch.zeros_like(p), []
    for t, g in enumerate(grads, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        mean = m / (1 - beta1**t)
        square = v / (1 - beta2**t)
        p = p * (1 - lr * decay) - lr * mean / (square.sqrt() + eps)
        out.append(p)
    return out
"""

DRILL = Drill(
    name="adamw",
    topic="training",
    difficulty=2,
    title=Text("AdamW", "AdamW"),
    task=Text(STUB.split('"""')[1], "不用 torch.optim 写 AdamW，返回每一步之后的参数；衰减与动量解耦，带偏差修正，eps 在根号外。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="training",
    functions=("adamw",),
    modules=("torch.optim",),
    hints=(
        Text("The moments start at zero: how large is the first update without a correction?", "动量从 0 开始：不修正时第一步有多大？"),
        Text("Divide m by 1 - beta1^t and v by 1 - beta2^t, with t from 1.", "m 除以 1-β1^t，v 除以 1-β2^t，t 从 1 开始。"),
        Text("p = p (1 - lr decay) - lr m̂ / (√v̂ + eps): the decay is outside of the moments, eps outside of the root.", "p = p(1 - lr·decay) - lr·m̂/(√v̂ + eps)：衰减不进动量，eps 在根号外。"),
    ),
    questions=(
        Question("How many bytes per parameter does it hold?", "每个参数占多少字节？", "bagu plan --help"),
        Question("Adam with L2 or AdamW: what differs?", "Adam + L2 与 AdamW 有何不同？", "bagu lab run optimizers"),
    ),
    planted=(
        Planted("torch", "m / (1 - beta1**t)", "m", "bias|formula|factor"),
        Planted("torch", "v / (1 - beta2**t)", "v", "bias|formula|factor"),
        Planted("torch", "enumerate(grads, 1)", "enumerate(grads)", "raises|bias|formula"),
        Planted("torch", "(square.sqrt() + eps)", "(square + eps).sqrt()", "eps|precision"),
        Planted("torch", "(square.sqrt() + eps)", "square.sqrt()", "eps|special|precision|formula"),
        Planted("torch", "    for t, g in enumerate(grads, 1):\n", "    for t, g in enumerate(grads, 1):\n        g = g + decay * p\n", "decay|formula"),
        Planted("torch", "(1 - lr * decay)", "(1 - decay)", "decay"),
        Planted("torch", "p * (1 - lr * decay)", "p", "ignored|decay|formula"),
        Planted("torch", "(1 - beta2) * g * g", "(1 - beta2) * g", "special|formula"),
        Planted("torch", "m = beta1 * m + (1 - beta1) * g", "m = beta1 * m + g", "formula|bias|factor"),
        Planted("torch", "- lr * mean", "+ lr * mean", "sign|formula"),
        Planted("torch", "        out.append(p)\n", "", "formula|type|empty"),
        Planted("torch", "    m, v, out =", "    p = p.float()\n    m, v, out =", "type|precision"),
        Planted("torch", "        p = p * (1 - lr * decay) - lr", "        p *= 1 - lr * decay\n        p -= lr", "changes_input|formula"),
    ),
)  # fmt: skip
