"""Batch and latency: tokens per second against the time per token, by batch; and Little's law.

A decode step reads all weights, for one sequence or for many. While reading them limits the step, more sequences are
free: tokens per second double with the batch, and the time per token stays. When arithmetic (or the Python around it)
limits the step, the time per token grows with the batch instead.

Little's law: in any system that loses nothing, L = λW, where L is the average number of requests in it, λ the rate of
requests and W the average time that one spends there. L is the engine's own count of requests at every step; λ and W
are from the times of the requests, so the law checks that the two agree: the engine keeps no request longer than its
client waits, and loses none. W counts from the step that takes a request. A client that counts from the arrival, which
may be in the middle of the step before, gets a larger λW; the difference is reported.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, number, where
from bagu.lab.parts.engine_load import MODEL, PROMPT, Served, serve
from bagu.lab.plot import INK, Line, Note, Panel
from bagu.nn import Transformer, init_weights

BATCHES = (1, 2, 4, 8, 16, 32, 64)
LOADS = (0.3, 0.6, 0.9)  # Poisson arrivals, as a fraction of the closed loop's rate
SLOTS = 16  # of the Poisson runs
ANSWER = 24  # tokens
FREE = 1.8  # a doubled batch is free if it has at least this times the tokens per second
ERROR = 0.01  # of Little's law, relative
ROUNDS = 3


def run(setting: Setting) -> list[Row]:
    model = init_weights(Transformer(MODEL, device=setting.device), 0).eval()
    batches, each, rounds, arriving = ((1, 4, 16), 2, 1, 24) if setting.quick else (BATCHES, 4, ROUNDS, 200)
    serve(model, [4] * SLOTS, slots=SLOTS)  # warmup
    rows: list[Row] = []
    for batch in setting.track(batches):
        runs = [serve(model, [ANSWER] * batch * each, slots=batch, seed=i) for i in range(rounds)]
        best = min(runs, key=lambda found: found.total)  # other load on the machine only makes a run slower
        rows.append({"load": "closed loop", "batch": batch, **facts(best)})
    full = next(number(row, "requests_per_s") for row in rows if row["batch"] == SLOTS)
    for share in LOADS[:1] if setting.quick else LOADS:
        gaps = np.random.default_rng(1).exponential(1 / (share * full), arriving)
        found = serve(model, [ANSWER] * arriving, slots=SLOTS, arrivals=list(np.cumsum(gaps)))
        rows.append({"load": f"Poisson, {share:.0%}", "batch": SLOTS, **facts(found)})
    return rows


def facts(found: Served) -> Row:
    return {
        "output_tokens_per_s": float(found.answers.sum() / found.total),
        "tpot_ms": float(1e3 * found.tpot.mean()),
        "requests_per_s": found.rate,
        "latency_s": float(found.latency.mean()),
        "in_system_requests": found.in_system,
        "rate_times_latency_requests": float(found.rate * (found.last - found.taken).mean()),
        "from_arrival_requests": float(found.rate * found.latency.mean()),
    }


def little_error(row: Row) -> float:
    """|L - λW| / L."""
    return abs(number(row, "rate_times_latency_requests") / number(row, "in_system_requests") - 1)


def doublings(rows: Sequence[Row]) -> dict[int, float]:
    """By batch: the factor of tokens per second for a doubling, from the measured batch before to this one."""
    closed = sorted(
        (int(number(r, "batch")), number(r, "output_tokens_per_s")) for r in rows if r["load"] == "closed loop"
    )
    return {b: (y / x) ** (1 / np.log2(b / a)) for (a, x), (b, y) in pairwise(closed)}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if every doubling is free and Little's law has an error of at most ERROR in every run."""
    gains, worst = doublings(rows), max(map(little_error, rows))
    early = max(number(r, "from_arrival_requests") / number(r, "in_system_requests") - 1 for r in rows)
    free = 1
    for batch, gain in gains.items():
        if gain < FREE:
            break
        free = batch
    closed = [r for r in rows if r["load"] == "closed loop"]
    low, high = closed[0], closed[-1]
    little = worst <= ERROR
    kind: Kind = "did not hold" if not little or free == 1 else "held" if free == max(gains) else "holds only where"
    ratio = number(high, "output_tokens_per_s") / number(low, "output_tokens_per_s")
    slower = number(high, "tpot_ms") / number(low, "tpot_ms")
    steps = ", ".join(f"×{gain:.2f} to {batch}" for batch, gain in gains.items())
    return Verdict(
        kind=kind,
        sentence_en=f"Tokens per second for each doubling of the batch: {steps}; nearly free (×{FREE} or more) up to "
        f"batch {free}. From batch {low['batch']} to {high['batch']}: ×{ratio:.1f} the tokens per second at "
        f"×{slower:.1f} the time per token. Little's law: L and λW differ by at most {worst:.1%} in {len(rows)} runs "
        f"(allowed {ERROR:.0%}); counted from the arrival in the middle of a step, λW is up to {early:.1%} larger.",
        sentence_zh=f"批每翻一倍的吞吐：{steps}；到批 {free} 为止近乎免费（至少 ×{FREE}）。从批 {low['batch']} 到 "
        f"{high['batch']}：吞吐 ×{ratio:.1f}，每 token 时间 ×{slower:.1f}。Little 定律：{len(rows)} 次运行中 L 与 λW "
        f"最多相差 {worst:.1%}（允许 {ERROR:.0%}）；自到达时刻（步中）起算，λW 最多大 {early:.1%}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    closed = where(rows, load="closed loop")
    x, y = column(closed, "tpot_ms"), column(closed, "output_tokens_per_s")
    notes = [Note(a, b, str(r["batch"]), shift=(6, -3)) for r, a, b in zip(closed, x, y, strict=True)]
    ends = [min(column(rows, "in_system_requests")), max(column(rows, "in_system_requests"))]
    law = [Line(ends, ends, "L = λW", ":", INK)]
    for i, kind in enumerate(("closed loop", "Poisson")):
        some = [r for r in rows if str(r["load"]).startswith(kind)]
        law.append(Line.of(some, "rate_times_latency_requests", "in_system_requests", kind, "os"[i], i))
    speed, unit = [Line(x, y), *notes], "time per output token, ms"
    return [
        Panel(speed, "Numbers are the batch", unit, "output tokens/s", xlim=(0, 1.1 * max(x)), ylim=(0, None)),
        Panel(law, "Little's law", "λW, requests", "L, requests in the engine", "log", "log"),
    ]


LAB = Claim(
    title_en="Batch and latency",
    title_zh="批与延迟",
    claim_en="A larger batch is nearly free: doubling it doubles the tokens per second. And L = λW at every load.",
    claim_zh="更大的批近乎免费：批翻一倍，每秒 token 数也翻一倍。并且任何负载下 L = λW。",
    regime=f"The engine on a Llama of 2 layers and 128 features, prompts of {PROMPT} tokens, outputs of {ANSWER}, "
    "without HTTP. Time is the sum of the step times, on a CPU the CPU time of one thread.",
    varies=f"Clients of a closed loop (the batch), 1 to {BATCHES[-1]}; Poisson arrivals at 30, 60 and 90 % of the "
    f"rate of {SLOTS} clients.",
    measures="Output tokens per second, time per output token; the number of requests in the engine (L), requests per "
    f"second (λ), mean latency (W). The fastest of {ROUNDS} runs. Nearly free: ×{FREE} or more for a doubling.",
    evidence="timing",
)
