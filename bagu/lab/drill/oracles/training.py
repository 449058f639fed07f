"""The truth of the drills of training: formulas in fp64, and what typical mistakes give."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from bagu.lab.drill.core import Drill, Text
from bagu.lab.drill.oracles.values import value_trial
from bagu.lab.drill.trial import Trial


def trials(drill: Drill, level: str, seed: int) -> Iterator[Trial]:
    yield from {"adamw": adamw_trials, "dpo_loss": dpo_trials, "gae": gae_trials}[drill.name](seed)


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def adamw(
    p: torch.Tensor,
    grads: list[torch.Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    *,
    mistake: str = "",
) -> list[torch.Tensor]:
    """The parameters after each step; or with a typical mistake."""
    m, v, out = torch.zeros_like(p), torch.zeros_like(p), []
    for t, g in enumerate(grads, 1):
        g = g + decay * p if mistake == "decay" else g
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        c1, c2 = (1.0, 1.0) if mistake == "bias" else (1 - beta1**t, 1 - beta2**t)
        root = (v / c2 + eps).sqrt() if mistake == "eps" else (v / c2).sqrt() + eps
        shrink = {"decay": 1.0, "decay:lr": 1 - decay}.get(mistake, 1 - lr * decay)
        p = p * shrink - lr * (m / c1) / root
        out.append(p)
    return out


def adamw_trials(seed: int) -> Iterator[Trial]:
    steps, plain = 20, Text("a trajectory of 20 steps", "20 步轨迹")
    for name, why, count, scale, eps, decay, edge in (
        ("plain", plain, steps, 1.0, 1e-8, 0.0, False),
        ("decay", Text("decay is decoupled: it does not enter the moments", "权重衰减与动量解耦"), steps, 1.0, 1e-8, 0.1, False),
        ("first", Text("the first step is lr in each direction, by the bias correction", "第一步由偏差修正决定"), 1, 1e-3, 1e-8, 0.0, True),
        ("tiny", Text("gradients near eps show where eps stands", "梯度接近 eps 时看出 eps 的位置"), steps, 1e-4, 1e-4, 0.0, True),
        ("zero", Text("gradients of 0 move nothing but the decay", "零梯度只剩衰减"), steps, 0.0, 1e-8, 0.1, True),
    ):  # fmt: skip
        p, grads = _normal(seed, 7), [scale * _normal(seed + 1 + i, 7) for i in range(count)]
        args: list[Any] = [p, grads, 0.01, 0.9, 0.99, eps, decay]
        suspects = {m: partial(adamw, *args, mistake=m) for m in ("bias", "decay", "decay:lr", "eps")}
        yield value_trial(name, why, "adamw", args, adamw(*args), edge=edge, suspects=suspects)
    args = [_normal(seed, 3), [], 0.01, 0.9, 0.99, 1e-8, 0.1]
    yield value_trial("none", Text("no step", "没有步"), "adamw", args, [], edge=True, cause="empty")


def dpo(
    pc: torch.Tensor,
    pr: torch.Tensor,
    rc: torch.Tensor,
    rr: torch.Tensor,
    beta: float,
    smoothing: float,
    *,
    mistake: str = "",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Losses and rewards of the chosen and the rejected answers."""
    chosen, rejected = beta * (pc - rc), beta * (pr - rr)
    margin = {"sign": rejected - chosen, "ignored": beta * (pc - pr), "factor": (chosen - rejected) / beta}.get(
        mistake, chosen - rejected
    )
    soft = lambda z: -torch.nn.functional.logsigmoid(-z)  # noqa: E731
    smoothing = 0.0 if mistake == "ignored:smoothing" else smoothing
    losses = (1 - smoothing) * soft(-margin) + smoothing * soft(margin)
    return (losses.mean() if mistake == "type" else losses), chosen, rejected


def dpo_trials(seed: int) -> Iterator[Trial]:
    def trial(
        name: str, why: Text, scale: float, beta: float, smoothing: float, edge: bool, same: bool = False
    ) -> Trial:
        pc, pr, rc, rr = (scale * _normal(seed + i, 6) - 20 for i in range(4))
        rc, rr = (pc, pr) if same else (rc, rr)
        args: list[Any] = [pc, pr, rc, rr, beta, smoothing]
        suspects = {m: partial(dpo, *args, mistake=m) for m in ("sign", "ignored", "factor", "ignored:smoothing")}
        return value_trial(name, why, "dpo_loss", args, dpo(*args), edge=edge, suspects=suspects,
                           cause="overflow" if name == "far" else "")  # fmt: skip

    yield trial(
        "start",
        Text("policy = reference: every loss is ln 2", "策略等于参考模型：损失为 ln 2"),
        3.0,
        0.1,
        0.0,
        False,
        True,
    )
    yield trial("plain", Text("margins of both signs", "正负间隔"), 3.0, 0.1, 0.0, False)
    yield trial("smooth", Text("label smoothing mixes both directions", "标签平滑混合两个方向"), 3.0, 0.5, 0.2, False)
    yield trial("far", Text("a margin of thousands must not overflow", "间隔上千也不能溢出"), 5000.0, 1.0, 0.1, True)
    empty = torch.zeros(0, dtype=torch.float64)
    yield value_trial(
        "none",
        Text("no pair", "没有样本对"),
        "dpo_loss",
        [empty] * 4 + [0.1, 0.0],
        (empty,) * 3,
        edge=True,
        cause="empty",
    )


def gae(
    rewards: torch.Tensor, values: torch.Tensor, done: torch.Tensor, discount: float, decay: float, *, mistake: str = ""
) -> torch.Tensor:
    """Advantages by the recursion from the end."""
    out, last = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        alive = 1.0 if mistake == "mask" else 1.0 - float(done[t])
        kept = 1.0 if mistake == "mask:sum" else alive
        after = float(values[t]) if mistake == "off_by_one" else float(values[t + 1])
        error = float(rewards[t]) + discount * after * alive - float(values[t])
        last = error + discount * (1.0 if mistake == "ignored" else decay) * kept * last
        last = error if mistake == "formula" else last
        out[t] = last
    return out + values[:-1] if mistake == "order" else out


def gae_trials(seed: int) -> Iterator[Trial]:
    none, some = (lambda n: torch.zeros(n, dtype=torch.bool)), (lambda n: _normal(seed + 9, n) > 0.8)
    every = lambda n: torch.ones(n, dtype=torch.bool)  # noqa: E731
    for name, why, n, done, discount, decay, edge in (
        ("plain", Text("one episode", "一个回合"), 12, none, 0.9, 0.8, False),
        ("episodes", Text("nothing crosses the end of an episode", "不跨越回合边界"), 40, some, 0.99, 0.95, False),
        ("monte_carlo", Text("decay 1: returns minus values", "λ = 1：回报减价值"), 12, some, 1.0, 1.0, True),
        ("one_step", Text("decay 0: the error of one step", "λ = 0：单步误差"), 12, none, 0.9, 0.0, True),
        ("all_done", Text("every step ends an episode", "每步都结束"), 8, every, 0.9, 0.9, True),
        ("token", Text("an answer of one token", "只有一个词元"), 1, none, 0.9, 0.9, True),
        ("empty", Text("no step", "没有步"), 0, none, 0.9, 0.9, True),
    ):
        args: list[Any] = [_normal(seed, n), _normal(seed + 1, n + 1), done(n), discount, decay]
        names = ("mask", "mask:sum", "off_by_one", "ignored", "formula", "order")
        suspects = {m: partial(gae, *args, mistake=m) for m in names}
        yield value_trial(
            name, why, "gae", args, gae(*args), edge=edge, suspects=suspects, cause="empty" if n == 0 else ""
        )
