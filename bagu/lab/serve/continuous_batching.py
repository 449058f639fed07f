"""Continuous batching: a new request starts when any sequence ends, or only when all sequences of the batch have ended.

    static, padded    a batch runs until its longest output is done; finished sequences are still computed, as in a
                      simple batched `generate`
    static            the same, but a finished sequence costs nothing
    continuous        the engine's own scheduling: the first waiting request takes a free slot, at any step

All three use one engine with the same number of slots; they differ in when requests are submitted. Time is the sum of
the step times; waiting for an arrival takes no time (the clock jumps), so a run is short. In all three an answer is
delivered with its last token, not with its batch, which favours the static ones.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, names_in, number
from bagu.lab.parts.engine_load import MODEL
from bagu.lab.plot import Bars, Panel
from bagu.nn import Transformer, init_weights
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling, TokenEvent

PADDED, STATIC, CONTINUOUS = WAYS = ("static, padded", "static", "continuous")
SLOTS, PROMPT, ANSWER = 16, 16, 32  # ANSWER is a mean number of tokens
LOAD = 0.6  # arrival rate, as a fraction of the maximum throughput of continuous batching
ROUNDS = 2
FASTER = 1.5  # the claim counts as met from this multiple of the static throughput


class Job(NamedTuple):
    prompt: tuple[int, ...]
    answer: int  # tokens
    arrival: float  # s


def answers(spread: str, n: int, stream: np.random.Generator) -> np.ndarray:
    """Output lengths with a mean of about ANSWER tokens: all equal, uniform, or a few long ones and many short."""
    if spread == "equal":
        return np.full(n, ANSWER)
    if spread == "uniform":
        return stream.integers(1, 2 * ANSWER, size=n)
    return np.clip(stream.lognormal(np.log(ANSWER) - 0.72, 1.2, n), 1, 8 * ANSWER).astype(int)  # mean exp(1.2² / 2)


SPREADS = ("equal", "uniform", "long tail")


def jobs(spread: str, n: int, seed: int, per_s: float | None) -> list[Job]:
    """Requests that all arrive at 0, or as a Poisson process of `per_s` per second."""
    stream = np.random.default_rng(seed)
    lengths = answers(spread, n, stream)
    arrivals = np.zeros(n) if per_s is None else np.cumsum(stream.exponential(1 / per_s, n))
    prompts = stream.integers(MODEL.vocab_size, size=(n, PROMPT)).tolist()
    return [Job(tuple(p), int(a), float(t)) for p, a, t in zip(prompts, lengths, arrivals, strict=True)]


def run(setting: Setting) -> Iterator[Row]:
    n, seeds, rounds = (24, (0,), 1) if setting.quick else (96, (0, 1, 2), ROUNDS)
    model = init_weights(Transformer(MODEL, device=setting.device), 0).eval()
    serve(model, jobs("equal", SLOTS, 0, None), CONTINUOUS)  # warmup
    for spread, seed in setting.track(list(product(SPREADS, seeds))):
        full = quietest(model, jobs(spread, n, seed, None), rounds)
        per_s = LOAD * n / number(full[CONTINUOUS], "total_s")
        arriving = quietest(model, jobs(spread, n, seed, per_s), rounds)
        for way in WAYS:
            row: Row = {"spread": spread, "seed": seed, "way": way, "requests": n}
            yield row | {"load": "all at once", "arrivals_per_s": None} | full[way]
            yield row | {"load": "poisson", "arrivals_per_s": per_s} | arriving[way]


def quietest(model: Transformer, work: Sequence[Job], rounds: int) -> dict[str, Row]:
    """For each way, the fastest of some interleaved runs: other load on the machine can only make a run slower."""
    every = [{way: serve(model, work, way) for way in WAYS} for _ in range(rounds)]
    return {way: min((found[way] for found in every), key=lambda row: number(row, "busy_s")) for way in WAYS}


def serve(model: Transformer, work: Sequence[Job], way: str) -> Row:
    """Run the jobs in one of the ways, and return the latencies from their arrival."""
    engine = Engine(model, None, EngineConfig(num_blocks=SLOTS * 32, max_num_seqs=SLOTS, prefix_cache=False))
    queue = deque(sorted(enumerate(work), key=lambda job: job[1].arrival))
    clock, busy, steps, rows = 0.0, 0.0, 0, 0
    drawn, first, last = [0] * len(work), [0.0] * len(work), [0.0] * len(work)
    while queue or engine.has_work:
        if not engine.has_work:
            clock = max(clock, queue[0][1].arrival)
        if way == CONTINUOUS or not engine.has_work:
            limit = len(queue) if way == CONTINUOUS else SLOTS
            batch: list[tuple[int, Job]] = []
            while queue and queue[0][1].arrival <= clock and len(batch) < limit:
                batch.append(queue.popleft())
            longest = max((job.answer for _, job in batch), default=0)
            for i, job in batch:
                sampling = Sampling(max_tokens=longest if way == PADDED else job.answer, temperature=0.0)
                engine.submit(Request(id=str(i), prompt=job.prompt, sampling=sampling, arrival=job.arrival))
        began = time.perf_counter()
        events = engine.step()
        took = time.perf_counter() - began
        clock, busy, steps = clock + took, busy + took, steps + 1
        for event in events:
            assert isinstance(event, TokenEvent)
            i, rows = int(event.request_id), rows + 1
            drawn[i] += 1
            first[i] = first[i] or clock
            if drawn[i] == work[i].answer:
                last[i] = clock
    tokens = sum(job.answer for job in work)
    waits = [1e3 * (t - job.arrival) for t, job in zip(first, work, strict=True)]
    takes = [1e3 * (t - job.arrival) for t, job in zip(last, work, strict=True)]
    return {
        "total_s": clock,
        "busy_s": busy,
        "steps": steps,
        "computed_for_nothing_percent": 100 * (1 - tokens / rows),
        "mean_batch_sequences": rows / steps,
        "answer_tokens_per_s": tokens / clock,
        "ttft_p50_ms": float(np.percentile(waits, 50)),
        "ttft_p99_ms": float(np.percentile(waits, 99)),
        "latency_p50_ms": float(np.percentile(takes, 50)),
        "latency_p99_ms": float(np.percentile(takes, 99)),
    }


def median(rows: Sequence[Row], key: str, **chosen: str) -> float:
    """The median over the seeds."""
    found = [number(row, key) for row in rows if all(row[name] == value for name, value in chosen.items())]
    return float(np.median(found))


def gains(rows: Sequence[Row], spread: str, base: str) -> tuple[float, float, float]:
    """The factors by which continuous batching has a higher throughput with all requests at once, a lower tail latency
    under arrivals, and fewer steps with all requests at once."""
    rate = {w: median(rows, "answer_tokens_per_s", spread=spread, way=w, load="all at once") for w in WAYS}
    tail = {w: median(rows, "latency_p99_ms", spread=spread, way=w, load="poisson") for w in WAYS}
    steps = {w: median(rows, "steps", spread=spread, way=w, load="all at once") for w in WAYS}
    return rate[CONTINUOUS] / rate[base], tail[base] / tail[CONTINUOUS], steps[base] / steps[CONTINUOUS]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if, for all distributions of lengths, continuous batching beats static batching without padding in both."""
    spreads = list(dict.fromkeys(str(row["spread"]) for row in rows))
    found = {spread: [gains(rows, spread, base) for base in (STATIC, PADDED)] for spread in spreads}
    good = [spread for spread, ((rate, tail, _), _) in found.items() if rate >= FASTER and tail > 1]
    kind: Kind = "held" if len(good) == len(spreads) else "holds only where" if good else "did not hold"
    en = "; ".join(
        f"{spread}: ×{a[0]:.1f} the throughput in 1/{a[2]:.1f} of the steps, p99 latency ÷{a[1]:.1f} "
        f"(×{b[0]:.1f} and ÷{b[1]:.1f} against padded)"
        for spread, (a, b) in found.items()
    )
    zh = "；".join(
        f"{spread}：吞吐 ×{a[0]:.1f}，步数 1/{a[2]:.1f}，p99 延迟 ÷{a[1]:.1f}"
        f"（对填充的静态批：×{b[0]:.1f}，÷{b[1]:.1f}）"
        for spread, (a, b) in found.items()
    )
    return Verdict(
        kind=kind,
        sentence_en=f"Continuous relative to static batching, by output lengths: {en}. At least ×{FASTER} and a "
        f"shorter tail: {', '.join(good) or 'none'}.",
        sentence_zh=f"连续批对静态批，按回答长度分布：{zh}。吞吐至少 ×{FASTER} 且尾延迟更短："
        f"{'、'.join(good) or '无'}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Throughput with all requests at once, and latency under arrivals: bars show p50, whiskers p99."""
    spreads, rates, latencies = names_in(rows, "spread"), [], []
    for way in WAYS:
        rates.append(
            Bars([median(rows, "answer_tokens_per_s", spread=s, way=way, load="all at once") for s in spreads], way)
        )
        mid, tail = (
            [median(rows, f"latency_{p}_ms", spread=s, way=way, load="poisson") for s in spreads]
            for p in ("p50", "p99")
        )
        latencies.append(Bars(mid, way, ends=list(zip(mid, tail, strict=True))))
    x, title = "output lengths", f"Poisson arrivals at {LOAD:.0%} (bar p50, whisker p99)"
    return [
        Panel(rates, "All requests at once", x, "output tokens/s", xnames=spreads, legend="below"),
        Panel(latencies, title, x, "arrival to last token, ms", xnames=spreads, legend="below"),
    ]


LAB = Claim(
    title_en="Continuous batching",
    title_zh="连续批处理",
    claim_en="Continuous batching has a higher throughput than static batching, and a shorter tail latency.",
    claim_zh="连续批处理的吞吐高于静态批处理，尾延迟也更短。",
    regime=f"The engine on a Llama of 2 layers and 128 features, {SLOTS} slots, prompts of {PROMPT} tokens, outputs of "
    f"about {ANSWER}. On a CPU a step with a prompt does not use the fast decode path and costs more, and "
    "continuous batching has more such steps.",
    varies="When requests are submitted; distribution of output lengths; all at once, or Poisson arrivals at "
    f"{LOAD:.0%} of the maximum throughput of continuous batching.",
    measures="Output tokens per second with all requests at once; latency from arrival to last token, p50 and p99 "
    f"over requests; medians over seeds. Met if the throughput is at least ×{FASTER} that of static without padding.",
    evidence="timing",
)
