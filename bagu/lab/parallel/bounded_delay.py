"""Bounded delay: how long workers of a parameter server wait when each may be τ updates ahead of the slowest.

Worker w may begin step t when all workers have finished step t - τ - 1. Only the times of the steps are drawn; the
arithmetic of the waiting is exact.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import product

from bagu.lab.core import Claim, Row, Setting, Verdict, listed, number, numbers_in, say, share_met, where
from bagu.lab.plot import Line, Panel

Draw = Callable[[int, random.Random], float]  # the seconds of a step of a worker
STEPS: dict[str, Draw] = {
    "jitter": lambda w, rng: math.exp(0.6 * rng.gauss(0, 1)),
    "rare stalls": lambda w, rng: 5.0 if rng.random() < 0.05 else 1.0,
    "one slow worker": lambda w, rng: (2.0 if w == 0 else 1.0) * (1 + 0.05 * rng.gauss(0, 1)),
}
LEFT = 0.25  # of the waiting without a delay: less counts as removed


def waited(workers: int, steps: int, delay: int, draw: Draw, rng: random.Random) -> tuple[float, float]:
    """The share of time that workers wait, and the steps of all of them a second."""
    finished = [[0.0] * workers]
    idle = 0.0
    for t in range(1, steps + 1):
        gate = max(finished[t - delay - 1]) if t - delay - 1 > 0 else 0.0
        begins = [max(gate, end) for end in finished[-1]]
        idle += sum(begins) - sum(finished[-1])
        finished.append([begin + draw(w, rng) for w, begin in enumerate(begins)])
    return idle / sum(finished[-1]), workers * steps / max(finished[-1])


def run(setting: Setting) -> Iterator[Row]:
    delays, steps = ((0, 8), 100) if setting.quick else ((0, 1, 2, 4, 8, 16), 1000)
    for name, workers in setting.track(list(product(STEPS, (4, 16)))):
        base = 0.0
        for delay in delays:
            idle, rate = waited(workers, steps, delay, STEPS[name], random.Random(workers))
            base = base or rate
            idle_percent = 100 * idle
            yield {
                "steps": name,
                "workers": workers,
                "delay": delay,
                "idle_percent": idle_percent,
                "speed": rate / base,
            }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if at delay 8 less than LEFT of the waiting is left, for every kind of steps."""
    met, said = [], []
    for name in dict.fromkeys(str(r["steps"]) for r in rows):
        most = max(numbers_in(rows, "workers"))
        none, some = (where(rows, steps=name, workers=most, delay=d)[0] for d in (0, 8))
        met.append(number(some, "idle_percent") <= LEFT * number(none, "idle_percent"))
        said.append(
            say(
                "{name} {a:.0f} % → {b:.0f} %, speed ×{s:.2f}",
                "{name} {a:.0f} % → {b:.0f} %，速度 ×{s:.2f}",
                name=name,
                a=number(none, "idle_percent"),
                b=number(some, "idle_percent"),
                s=number(some, "speed"),
            )
        )
    return Verdict.say(
        share_met(met),
        "Time waited by {most:.0f} workers without a delay and at 8 updates: {said}.",
        "{most:.0f} 个工作进程的等待时间，无延迟与延迟 8 次更新：{said}。",
        most=max(numbers_in(rows, "workers")),
        said=listed(said, "; ", "；"),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    most = max(numbers_in(rows, "workers"))
    lines = [Line.of(where(rows, steps=name, workers=most), "delay", "idle_percent", name) for name in STEPS]
    return [Panel(lines, f"{most:.0f} workers", "delay, updates", "time waited, %")]


LAB = Claim(
    title_en="Bounded delay",
    title_zh="有界延迟",
    claim_en="Letting workers be a few updates ahead of the slowest removes their waiting.",
    claim_zh="允许工作进程比最慢者超前几次更新，就能消除等待。",
    regime="Workers of a parameter server, times of steps drawn from a distribution; messages take no time.",
    varies="Delay 0 to 16 updates; 4 and 16 workers; jitter (lognormal, σ 0.6), 5 % of steps 5 times as long, one "
    "worker always twice as slow.",
    measures=f"Share of time that workers wait, and speed against no delay. Removed: at most {LEFT} of the waiting is "
    "left at delay 8.",
)
