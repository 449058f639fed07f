"""Workers of unlike speed: data parallelism with equal shares of a step, and with shares by measured speed.

Four processes train a small model with the trainer's own step. A speed is emulated by a wait for each micro-batch, so
that the processes do not compete for the cores of one machine.
"""

from collections.abc import Iterator, Sequence

from bagu.bench.shares import compare
from bagu.lab.core import Claim, Row, Setting, Verdict, listed, number, say, share_met, where
from bagu.lab.plot import Line, Panel

SPEEDS = ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.5), (1.0, 1.0, 0.5, 0.25))
NEAR = 0.15  # of the slowest worker's pace: a step that is not faster than this follows it


def run(setting: Setting) -> Iterator[Row]:
    wait_s, batches, rounds = (0.05, 16, 3) if setting.quick else (0.1, 28, 8)
    base = 0.0
    for speeds in setting.track(SPEEDS):
        found = compare(speeds, wait_s, batches, rounds)
        base = base or found.equal_tokens_per_s
        for shares, rate in (("equal", found.equal_tokens_per_s), ("measured", found.measured_tokens_per_s)):
            yield {
                "speeds": ":".join(f"{speed:g}" for speed in speeds),
                "slowest": min(speeds),
                "shares": shares,
                "micro_batches": ":".join(map(str, found.shares)) if shares == "measured" else "",
                "tokens_per_s": rate,
                "relative": rate / base,
                "predicted": found.predicted_tokens_per_s / base if shares == "measured" else min(speeds),
            }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if every step has the pace of its slowest worker, whatever the shares are."""
    met, said = [], []
    for row in (r for r in rows if number(r, "slowest") < 1):
        met.append(number(row, "relative") <= (1 + NEAR) * number(row, "slowest"))
        if row["shares"] == "measured":
            same = where(rows, speeds=row["speeds"], shares="equal")[0]
            said.append(
                say(
                    "{name} equal ×{a:.2f}, measured ×{b:.2f} (predicted {p:.2f})",
                    "{name} 均分 ×{a:.2f}，按速度 ×{b:.2f}（预测 {p:.2f}）",
                    name=row["speeds"],
                    a=number(same, "relative"),
                    b=number(row, "relative"),
                    p=number(row, "predicted"),
                )
            )
    return Verdict.say(
        share_met(met),
        "Tokens per second against four equal workers, by speeds: {said}.",
        "与四个同速进程相比的每秒 token 数，按速度：{said}。",
        said=listed(said, "; ", "；"),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = [Line.of(where(rows, shares=shares), "slowest", "relative", shares) for shares in ("equal", "measured")]
    return [Panel(lines, "Four workers", "speed of the slowest", "tokens/s against equal workers")]


LAB = Claim(
    title_en="Unlike workers",
    title_zh="快慢不一的进程",
    claim_en="A data-parallel step takes as long as its slowest worker.",
    claim_zh="数据并行的一步与最慢的进程一样久。",
    regime="Four processes on one machine; a wait fills the time of each micro-batch by its worker's speed, and is "
    "longer than the model computes.",
    varies="Speeds 1:1:1:1, 1:1:1:½, 1:1:½:¼; equal shares of a step's micro-batches, and shares by measured speed.",
    measures=f"Tokens per second against four workers of speed 1. A step follows its slowest worker if it is at most "
    f"{NEAR} faster than that worker's pace.",
    evidence="timing",
)
