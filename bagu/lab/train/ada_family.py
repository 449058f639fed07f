"""Effective steps of Adagrad, RMSProp and Adam: the size of the update over its learning rate, step by step."""

from collections.abc import Callable, Iterator, Sequence

import torch

from bagu.lab.core import Claim, Row, Setting, Verdict, names_in, number, share_met, where
from bagu.lab.plot import Line, Panel
from bagu.train.optim import rules

DIES, LIVES = 0.1, 0.5  # of the first step
NOISE = 0.5


def updates(name: str, gradients: torch.Tensor) -> list[float]:
    """The root mean square of each update at a learning rate of 1."""
    p, first, second = (torch.zeros(gradients.shape[1], dtype=torch.float64) for _ in range(3))
    plain: dict[str, Callable[[torch.Tensor, rules.Now], None]] = {
        "Adagrad": lambda g, now: rules.adagrad(p, g, first, now, eps=1e-8, weight_decay=0.0),
        "RMSProp": lambda g, now: rules.rmsprop(p, g, first, now, rho=0.99, eps=1e-8, weight_decay=0.0),
        "Adam": lambda g, now: rules.adam(p, g, first, second, now, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
        # corrected by 1 − β^t with a large t: as if there were no correction
        "Adam, uncorrected": lambda g, now: rules.adam(
            p, g, first, second, rules.Now(lr=1.0, step=10**6), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
        ),
    }
    found = []
    for step, g in enumerate(gradients, 1):
        before = p.clone()
        plain[name](g.clone(), rules.Now(lr=1.0, step=step))
        found.append(float((p - before).square().mean().sqrt()))
    return found


def run(setting: Setting) -> Iterator[Row]:
    steps = 100 if setting.quick else 2000
    noise = torch.randn(steps, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for name in setting.track(("Adagrad", "RMSProp", "Adam", "Adam, uncorrected")):
        for step, size in enumerate(updates(name, 1 + NOISE * noise), 1):
            if step in (1, 2, 3, 5) or step % (steps // 50) == 0:
                yield {"name": name, "step": step, "update": size}


def ends(rows: Sequence[Row], name: str) -> tuple[float, float]:
    own = where(rows, name=name)
    return number(own[0], "update"), number(own[-1], "update")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if Adagrad's step dies, the others' live, and Adam without correction begins too large."""
    first, last = zip(*(ends(rows, name) for name in ("Adagrad", "RMSProp", "Adam", "Adam, uncorrected")), strict=True)
    return Verdict.say(
        share_met([last[0] < DIES * first[0], last[2] > LIVES * first[2], first[3] > 2 * first[2]]),
        "The update for one unit of learning rate, first and at step {steps}: Adagrad {a0:.2f} and {a1:.3f}, "
        "RMSProp {r0:.1f} and "
        "{r1:.2f}, Adam {m0:.2f} and {m1:.2f}, without correction {u0:.2f} and {u1:.2f}.",
        "学习率为 1 时的更新，第一步与第 {steps} 步：Adagrad {a0:.2f} 与 {a1:.3f}，RMSProp {r0:.1f} 与 {r1:.2f}，"
        "Adam {m0:.2f} 与 {m1:.2f}，不修正 {u0:.2f} 与 {u1:.2f}。",
        steps=max(int(number(r, "step")) for r in rows),
        **{f"{k}{i}": (first, last)[i][n] for n, k in enumerate("armu") for i in (0, 1)},
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line.of(where(rows, name=name), "step", "update", name, "-") for name in names_in(rows, "name")]
    return [Panel(lines, "Update for one unit of learning rate", "step", "root mean square", "log", "log")]


LAB = Claim(
    title_en="The family of Adagrad",
    title_zh="Adagrad 家族",
    claim_en="Adagrad's step dies away, RMSProp's and Adam's do not, and without bias correction Adam's first "
    "steps are wrong.",
    claim_zh="Adagrad 的步长会逐渐消失，RMSProp 与 Adam 不会；没有偏差修正，Adam 最初几步的大小不对。",
    regime=f"The rules of bagu.train.optim in fp64, 256 coordinates with gradients of mean 1 and noise {NOISE}, "
    f"2,000 steps (quick: 100).",
    varies="The rule; Adam with and without bias correction.",
    measures=f"Root mean square of an update. Dies: below {DIES:.0%} of the first; lives: above {LIVES:.0%}; "
    f"wrong: by ×2 or more.",
)
