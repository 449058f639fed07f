"""NumPy and threads: the CPU time of a call over its wall time is the number of cores that it keeps busy."""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, names_in, number, share_met
from bagu.lab.plot import Bars, Panel, Rule
from bagu.machine.cores import available_cores

PARALLEL = 1.3  # cores kept busy: more than one thread
ALONE = 0.8  # of a core: one thread gets less on a machine that others use
ROUNDS = 5


def calls(n: int) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    x, y, side = rng.standard_normal(n), np.empty(n), int(n**0.5) // 2
    a = rng.standard_normal((side, side))
    return {
        "add": lambda: np.add(x, x, out=y),
        "exp": lambda: np.exp(x, out=y),
        "sum": lambda: np.sum(x),
        "sort": lambda: np.sort(x),
        "dot": lambda: a @ a,
    }


def busy(call: Callable[[], object], seconds: float) -> float:
    """CPU time of this process over wall time. Other programs only lower it, so the most of some rounds is taken."""
    found = []
    call()
    for _ in range(ROUNDS):
        wall, cpu = time.perf_counter(), time.process_time()
        while time.perf_counter() - wall < seconds:
            call()
        found.append((time.process_time() - cpu) / (time.perf_counter() - wall))
    return max(found)


def run(setting: Setting) -> Iterator[Row]:
    n, seconds = (1 << 18, 0.02) if setting.quick else (1 << 22, 0.3)
    for name, call in setting.track(list(calls(n).items())):
        yield {"call": name, "elements": n, "cores": available_cores(), "busy_cores": busy(call, seconds)}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if every call keeps more than one core busy. A machine that is busy or has one core cannot show it."""
    each = listed(f"{row['call']} {number(row, 'busy_cores'):.2f}" for row in rows)
    several = [str(row["call"]) for row in rows if number(row, "busy_cores") > PARALLEL]
    found = Verdict.say(
        share_met(row["call"] in several for row in rows),
        "Cores kept busy on a machine with {cores}: {each}. More than one: {several}. The rest is one thread.",
        "在有 {cores} 个核的机器上占用的核数：{each}。超过一个的：{several}。其余都是单线程。",
        cores=rows[0]["cores"],
        each=each,
        several=listed(several) if several else listed(["none"])._replace(zh="无"),
    )
    if number(rows[0], "cores") > 1 and min(column(rows, "busy_cores")) >= ALONE:
        return found
    return found.undecided("an idle machine with two cores or more.", "一台至少两个核的空闲机器。")


def plot(rows: Sequence[Row]) -> list[Panel]:
    names = names_in(rows, "call")
    marks = [Bars(column(rows, "busy_cores"), colour="each", text="{:.2f}"), Rule(1)]
    return [Panel(marks, "CPU time over wall time", y="cores kept busy", xnames=names)]


LAB = Claim(
    title_en="NumPy and threads",
    title_zh="NumPy 与多线程",
    claim_en="NumPy is fast because it runs in parallel.",
    claim_zh="NumPy 快，是因为它是并行的。",
    regime="float64 arrays of 4 million elements (quick: 262,144), a square matrix product; NumPy's own threads, "
    "as many as its BLAS starts.",
    varies="The call: add, exp, sum, sort, dot.",
    measures=f"CPU time of the process over wall time, the most of {ROUNDS} rounds. Parallel: more than {PARALLEL}.",
    evidence="timing",
)
