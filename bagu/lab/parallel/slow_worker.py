"""One worker that is always slow: what a bounded delay does for it, and what a smaller share does.

Times of steps are drawn; waiting under a delay is that of bounded_delay.py, shares are those of the trainer
(parallel/unlike/shares.py), which sees only the times.
"""

import random
from collections.abc import Iterator, Sequence

from bagu.lab.core import Claim, Row, Setting, Verdict, listed, number, numbers_in, say, share_met, where
from bagu.lab.parallel.bounded_delay import waited
from bagu.lab.plot import Line, Panel
from bagu.parallel.unlike.shares import Shares

WORKERS, BATCHES = 4, 28  # micro-batches of a step
NOISE = 0.05  # standard deviation of a step's time
HELPS = 1.2  # times the tokens a second


def shared_rate(slowness: float, steps: int, rng: random.Random) -> float:
    """The steps of all workers a second, with shares by measured speed; a worker of speed 1 takes one second for an
    equal share."""
    shares, total = Shares(WORKERS), 0.0
    for _ in range(steps):
        counts = shares.counts(BATCHES)
        seconds = [
            count * WORKERS / BATCHES * (slowness if worker == 0 else 1.0) * (1 + NOISE * rng.gauss(0, 1))
            for worker, count in enumerate(counts)
        ]
        shares.record(counts, seconds)
        total += max(seconds)
    return WORKERS * steps / total


def run(setting: Setting) -> Iterator[Row]:
    delays, steps = ((0, 8), 100) if setting.quick else ((0, 1, 2, 4, 8, 16), 1000)
    for slowness in setting.track((2.0, 4.0)):
        base = 0.0
        for delay in delays:
            draw = lambda w, rng: (slowness if w == 0 else 1.0) * (1 + NOISE * rng.gauss(0, 1))  # noqa: E731, B023
            _, rate = waited(WORKERS, steps, delay, draw, random.Random(0))
            base = base or rate
            yield {"slowness": slowness, "way": "delay", "delay": delay, "speed": rate / base}
        rate = shared_rate(slowness, steps, random.Random(0))
        yield {"slowness": slowness, "way": "shares", "delay": 0, "speed": rate / base}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if a delay of 8 updates makes every run HELPS times as fast."""
    met, said = [], []
    for slowness in numbers_in(rows, "slowness"):
        delayed = number(where(rows, slowness=slowness, way="delay", delay=8)[0], "speed")
        shared = number(where(rows, slowness=slowness, way="shares")[0], "speed")
        met.append(delayed >= HELPS)
        said.append(
            say(
                "{slow:g} times as slow: delay 8 ×{a:.2f}, shares by speed ×{b:.2f}",
                "慢 {slow:g} 倍：延迟 8 次 ×{a:.2f}，按速度分配 ×{b:.2f}",
                slow=slowness,
                a=delayed,
                b=shared,
            )
        )
    return Verdict.say(
        share_met(met),
        "One of four workers is always slow; speed against equal shares without a delay: {said}.",
        "四个进程之一总是慢；与均分、无延迟相比的速度：{said}。",
        said=listed(said, "; ", "；"),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    panels = []
    for slowness in numbers_in(rows, "slowness"):
        delayed = where(rows, slowness=slowness, way="delay")
        (shared,) = where(rows, slowness=slowness, way="shares")
        flat = [shared | {"delay": row["delay"]} for row in delayed]
        lines = [Line.of(delayed, "delay", "speed", "delay"), Line.of(flat, "delay", "speed", "shares, no delay")]
        panels.append(Panel(lines, f"one of four {slowness:g} times as slow", "delay, updates", "speed"))
    return panels


LAB = Claim(
    title_en="A slow worker",
    title_zh="一个慢进程",
    claim_en="A bounded delay makes up for a worker that is always slow.",
    claim_zh="有界延迟可以弥补一个总是慢的进程。",
    regime="Four workers, times of steps drawn with 5 % noise; messages take no time; 28 micro-batches a step.",
    varies="One worker 2 or 4 times as slow; delay 0 to 16 updates with equal shares; shares by measured speed.",
    measures=f"Steps per second against equal shares without a delay. Made up: {HELPS} times as fast at delay 8.",
)
