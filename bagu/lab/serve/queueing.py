"""Queueing: latency against load, where it bends upwards, and the formula that says so.

One slot that serves requests in order is an M/G/1 queue: Poisson arrivals of rate λ, any distribution of the service
time S. Its mean wait is (Pollaczek and Khinchine)

    wait = λ E[S²] / (2 (1 - ρ))          ρ = λ E[S]

so ρ / (1 - ρ) doubles from 0.5 to 0.67, again to 0.8 and again to 0.89. An engine with many slots runs requests at once
and has no such formula: each step is longer when more requests run. A request then rarely waits for a slot, and its
latency grows because it shares the steps.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number, numbers_in, where
from bagu.lab.parts.engine_load import MODEL, PROMPT, Served, serve
from bagu.lab.plot import INK, Line, Panel, Rule
from bagu.nn import Transformer, init_weights

LOADS = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
SLOTS = (1, 16)
SEEDS = 3
ANSWER = 8  # mean output tokens; geometric
BEND = 2.0  # the latency bends where its p99 passes this times that of the lowest load
CLOSE = 0.25  # allowed relative error of the formula, for the mean over the loads


def answers(n: int, seed: int) -> list[int]:
    return [int(a) for a in np.minimum(np.random.default_rng(seed).geometric(1 / ANSWER, n), 8 * ANSWER)]


def run(setting: Setting) -> Iterator[Row]:
    model = init_weights(Transformer(MODEL, device=setting.device), 0).eval()
    loads, seeds, n = ((0.3, 0.8), 1, 50) if setting.quick else (LOADS, SEEDS, 250)
    serve(model, [4] * 16, slots=16)  # warmup
    for slots, seed in setting.track(list(product(SLOTS, range(seeds)))):
        full = serve(model, answers(n, seed), slots=slots, seed=seed).rate  # a closed loop: every slot is always busy
        for load in loads:
            gaps = np.random.default_rng([seed, 7]).exponential(1 / (load * full), n)
            found = serve(model, answers(n, seed), slots=slots, arrivals=list(np.cumsum(gaps)), seed=seed)
            yield {"slots": slots, "seed": seed, "load": load, "capacity_per_s": full, **facts(found, slots)}


def facts(found: Served, slots: int) -> Row:
    """Latencies, and for one slot the wait and what the formula says of this run's arrivals and service times."""
    wait = formula = None
    if slots == 1:
        start = np.maximum(found.arrival, np.concatenate([[0.0], found.last[:-1]]))
        service, rate = found.last - start, len(found.last) / found.arrival[-1]
        busy = float(rate * service.mean())
        wait = float(1e3 * (start - found.arrival).mean())
        formula = float(1e3 * rate * (service**2).mean() / (2 * (1 - busy))) if busy < 1 else None
    return {
        "latency_p50_ms": float(1e3 * np.percentile(found.latency, 50)),
        "latency_p99_ms": float(1e3 * np.percentile(found.latency, 99)),
        "mean_wait_ms": wait,
        "formula_wait_ms": formula,
    }


def middle(rows: Sequence[Row], key: str, slots: int, load: float) -> float:
    """The median over the seeds."""
    return float(np.median([number(r, key) for r in rows if (r["slots"], r["load"]) == (slots, load)]))


def bend(rows: Sequence[Row], slots: int) -> float:
    """The highest measured load up to which p99 stays within BEND times that of the lowest load."""
    loads = sorted({number(r, "load") for r in rows})
    kept = loads[0]
    for load in loads:
        if middle(rows, "latency_p99_ms", slots, load) > BEND * middle(rows, "latency_p99_ms", slots, loads[0]):
            break
        kept = load
    return kept


def formula_ratio(rows: Sequence[Row]) -> float:
    """Measured wait over the formula's: the geometric mean over the runs with one slot that the formula covers."""
    some = [r for r in rows if r["slots"] == 1 and r["formula_wait_ms"] is not None and number(r, "mean_wait_ms") > 0]
    logs = [math.log(number(r, "mean_wait_ms") / number(r, "formula_wait_ms")) for r in some]
    return math.exp(sum(logs) / len(logs)) if logs else math.inf


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the formula is within CLOSE for one slot, and p99 at the highest load is over BEND times that at the
    lowest with one slot and with many."""
    loads = sorted({number(r, "load") for r in rows})
    off = formula_ratio(rows)
    fits = abs(off - 1) <= CLOSE
    rise = {
        s: middle(rows, "latency_p99_ms", s, loads[-1]) / middle(rows, "latency_p99_ms", s, loads[0]) for s in SLOTS
    }
    bends = [s for s in SLOTS if rise[s] > BEND]
    both = fits and len(bends) == len(SLOTS)
    kind: Kind = "held" if both else "holds only where" if fits or bends else "did not hold"
    at = {s: bend(rows, s) for s in SLOTS}
    en = "; ".join(
        f"{s} slot{'s' * (s > 1)}: p99 ×{rise[s]:.1f} from {loads[0]:.0%} to {loads[-1]:.0%} load, within ×{BEND:g} up "
        f"to {at[s]:.0%}, so this target costs {1 - at[s]:.0%} of the capacity"
        for s in SLOTS
    )
    zh = "；".join(
        f"{s} 个槽：负载 {loads[0]:.0%} 到 {loads[-1]:.0%} 时 p99 ×{rise[s]:.1f}，×{BEND:g} 以内可到 {at[s]:.0%}，"
        f"即此目标要放弃 {1 - at[s]:.0%} 的能力"
        for s in SLOTS
    )
    return Verdict(
        kind=kind,
        sentence_en=f"{en}. One slot: the mean wait is {off:.2f} of the Pollaczek–Khinchine formula (allowed: "
        f"{CLOSE:.0%} off).",
        sentence_zh=f"{zh}。单槽平均等待为 Pollaczek–Khinchine 公式的 {off:.2f} 倍（允许偏差 {CLOSE:.0%}）。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    loads = numbers_in(rows, "load")
    x, marks = [100 * load for load in loads], []
    for i, slots in enumerate(SLOTS):
        base, name = middle(rows, "latency_p99_ms", slots, loads[0]), f"{slots} slot{'s' * (slots > 1)}"
        for percentile, style in (("p99", "o-"), ("p50", "o--")):
            y = [middle(rows, f"latency_{percentile}_ms", slots, load) / base for load in loads]
            marks.append(Line(x, y, f"{name}, {percentile}", style, i))
    one = [r for r in where(rows, slots=1) if r["formula_wait_ms"] is not None]
    at = [100 * load for load in column(one, "load")]
    waits = [
        Line(at, column(one, "mean_wait_ms"), "measured", "o"),
        Line(at, column(one, "formula_wait_ms"), "Pollaczek–Khinchine, of the same run", "x", INK),
    ]
    unit, over = "load, % of capacity", "latency over p99 at the lowest load"
    return [
        Panel([*marks, Rule(BEND)], "Latency by load", unit, over),
        Panel(waits, "One slot: an M/G/1 queue", unit, "mean wait, ms", ylim=(0, None)),
    ]


LAB = Claim(
    title_en="Queueing",
    title_zh="排队",
    claim_en="Latency is flat at low load and bends upwards like 1 / (1 - load), as queueing theory says.",
    claim_zh="负载低时延迟平缓，随后按 1 / (1 - 负载) 上翘，与排队论一致。",
    regime=f"The engine on a Llama of 2 layers and 128 features, prompts of {PROMPT} tokens, geometric outputs of "
    f"{ANSWER} tokens on average, Poisson arrivals, without HTTP. Time is the sum of the step times, on a CPU the "
    "CPU time of one thread.",
    varies="Arrival rate, as a fraction of the rate with all slots busy; one slot, or 16 (continuous batching).",
    measures="Latency from arrival to last token, p50 and p99 over requests, medians over seeds; with one slot the "
    "mean wait against the M/G/1 formula with the measured service times. A latency target of twice the p99 at low "
    "load costs the capacity above the load where it is passed.",
    evidence="timing",
)
