"""Generalized advantage estimation."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Generalized advantage estimation.

gae(rewards, values, done, discount, decay) -> advantages[T]
    rewards [T]      values [T + 1]: the last is the value of the state after the last step
    done [T]         True where an episode ends with this step: nothing after it counts

    error[t] = rewards[t] + discount * values[t + 1] * (not done[t]) - values[t]
    advantage[t] = error[t] + discount * decay * (not done[t]) * advantage[t + 1]

T may be 0. Paper: https://arxiv.org/abs/1506.02438
"""

import torch


def gae(rewards, values, done, discount, decay):
    raise NotImplementedError
'''
SOLUTION = """import torch


def gae(rewards, values, done, discount, decay):
    alive = 1 - done.to(rewards.dtype)
    error = rewards + discount * values[1:] * alive - values[:-1]
    out = torch.zeros_like(rewards)
    last = torch.zeros((), dtype=rewards.dtype)
    for t in reversed(range(len(rewards))):
        last = error[t] + discount * decay * alive[t] * last
        out[t] = last
    return out
"""

DRILL = Drill(
    name="gae",
    topic="training",
    difficulty=2,
    title=Text("generalized advantage estimation", "广义优势估计 GAE"),
    task=Text(STUB.split('"""')[1], "从后往前递推 GAE；回合结束之后的一切都不计入。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="training",
    functions=("gae",),
    hints=(
        Text("Which end of the sequence knows its advantage first?", "序列的哪一端最先知道自己的优势？"),
        Text("Walk backwards and carry one number.", "从后往前走，只带一个数。"),
        Text("`done` cuts twice: the next value in the error, and the carried sum.", "done 切断两处：误差里的下一个价值，以及递推的和。"),
    ),
    questions=(
        Question("What do decay 0 and decay 1 give?", "λ = 0 与 λ = 1 分别是什么？", "bagu lab run ppo_grpo"),
        Question("Why does GRPO need no values?", "为什么 GRPO 不需要价值网络？", "bagu lab run ppo_grpo"),
    ),
    planted=(
        Planted("torch", "values[1:] * alive", "values[1:]", "mask|formula"),
        Planted("torch", "decay * alive[t] * last", "decay * last", "mask"),
        Planted("torch", "alive = 1 - done.to(rewards.dtype)", "alive = torch.ones_like(rewards)", "mask"),
        Planted("torch", "alive = 1 - done.to(rewards.dtype)", "alive = done.to(rewards.dtype)", "formula|sign|mask"),
        Planted("torch", "discount * decay * alive", "discount * alive", "ignored"),
        Planted("torch", "discount * decay * alive", "decay * alive", "formula|ignored"),
        Planted("torch", "reversed(range(len(rewards)))", "range(len(rewards))", "order|formula"),
        Planted("torch", "discount * values[1:] * alive - values[:-1]", "discount * values[:-1] * alive - values[:-1]", "off_by_one"),
        Planted("torch", "- values[:-1]", "- values[1:]", "off_by_one|formula"),
        Planted("torch", "    return out", "    return out + values[:-1]", "order|formula"),
        Planted("torch", "    return out", "    return (out - out.mean()) / (out.std() + 1e-8)", "normalize|formula|factor"),
        Planted("torch", "reversed(range(len(rewards)))", "reversed(range(len(rewards) - 1))", "off_by_one|tail|formula"),
        Planted("torch", "        out[t] = last", "        out[t] = error[t]", "formula|ignored"),
        Planted("torch", "rewards + discount", "rewards.float() + discount", "precision|type|raises"),
    ),
)  # fmt: skip
