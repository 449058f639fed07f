"""DPO's loss."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""The loss of direct preference optimization, of each pair of answers.

dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta, smoothing)
    -> (losses[N], chosen_rewards[N], rejected_rewards[N])

The arguments are summed log-probabilities [N] of the answers. A reward is beta times the policy's log-probability minus
the reference's. loss = -(1 - smoothing) log sigmoid(margin) - smoothing log sigmoid(-margin), with margin the difference of
the rewards. A margin may be in the thousands; torch's logsigmoid and softplus are not allowed.
"""

import torch


def dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta, smoothing):
    raise NotImplementedError
'''
SOLUTION = """import torch


def negative_log_sigmoid(z):
    return z.clamp(max=0).neg() + torch.log1p(torch.exp(-z.abs()))


def dpo_loss(policy_chosen, policy_rejected, reference_chosen, reference_rejected, beta, smoothing):
    chosen = beta * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    margin = chosen - rejected
    losses = (1 - smoothing) * negative_log_sigmoid(margin) + smoothing * negative_log_sigmoid(-margin)
    return losses, chosen, rejected
"""

DRILL = Drill(
    name="dpo_loss",
    topic="training",
    difficulty=2,
    title=Text("DPO's loss", "DPO 损失"),
    task=Text(STUB.split('"""')[1], "写出每个偏好对的 DPO 损失与两个奖励；间隔上千也不能溢出，不得使用 logsigmoid 与 softplus。\n" + STUB.split('"""')[1]),
    stubs={"torch": STUB},
    solutions={"torch": SOLUTION},
    oracle="training",
    functions=("dpo_loss",),
    forbidden=("log_sigmoid_forward", "softplus", "torch.nn.functional.logsigmoid", "logsigmoid"),
    hints=(
        Text("What is the loss before the first step, when policy and reference agree?", "第一步之前（策略等于参考）损失是多少？"),
        Text("-log sigmoid(z) = log(1 + exp(-z)): which side overflows?", "-log sigmoid(z) = log(1+exp(-z))：哪一侧会溢出？"),
        Text("max(-z, 0) + log1p(exp(-|z|)) is exact on both sides.", "max(-z,0) + log1p(exp(-|z|)) 两侧都精确。"),
    ),
    questions=(
        Question("Why does the partition function cancel?", "为什么配分函数被消去？", "bagu lab run dpo_reward_model"),
        Question("What does beta trade?", "beta 在权衡什么？", "bagu train --recipe dpo --dry-run"),
    ),
    planted=(
        Planted("torch", "margin = chosen - rejected", "margin = rejected - chosen", "sign"),
        Planted("torch", "beta * (policy_chosen - reference_chosen)", "beta * policy_chosen", "formula|ignored"),
        Planted("torch", "beta * (policy_chosen - reference_chosen)", "policy_chosen - reference_chosen", "formula|factor"),
        Planted("torch", "z.clamp(max=0).neg() + torch.log1p(torch.exp(-z.abs()))", "torch.log(1 + torch.exp(-z))", "overflow|precision"),
        Planted("torch", "z.clamp(max=0).neg() + torch.log1p(torch.exp(-z.abs()))", "-torch.log(1 / (1 + torch.exp(-z)))", "overflow|precision"),
        Planted("torch", "(1 - smoothing) * negative_log_sigmoid(margin) + smoothing * negative_log_sigmoid(-margin)", "negative_log_sigmoid(margin)", "ignored"),
        Planted("torch", "smoothing * negative_log_sigmoid(-margin)", "smoothing * negative_log_sigmoid(margin)", "ignored|formula"),
        Planted("torch", "return losses, chosen, rejected", "return losses.mean(), chosen, rejected", "type"),
        Planted("torch", "return losses, chosen, rejected", "return losses, rejected, chosen", "order|formula|sign"),
        Planted("torch", "return losses, chosen, rejected", "return losses", "type"),
        Planted("torch", "z.clamp(max=0).neg()", "z.clamp(min=0).neg()", "formula|sign"),
        Planted("torch", "torch.exp(-z.abs())", "torch.exp(z.abs())", "overflow|formula|sign"),
        Planted("torch", "(1 - smoothing) * negative", "negative", "formula|ignored|factor"),
    ),
)  # fmt: skip
