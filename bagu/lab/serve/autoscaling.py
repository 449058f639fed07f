"""When another replica is started: by the length of the queue, or by the wait that is predicted for the next request.

    queue   waiting requests for each replica
    wait    seconds until the next request would begin, as the router predicts them (serve/replicas)

Scaler, router and predictions are the server's own, and only the signal differs; the replicas count time. A threshold
is a number that an operator sets once, for whatever load comes. So each signal gets one for all loads: the cheapest
that keeps the target under every one of them.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from bagu.lab.core import Claim, Kind, Row, Setting, Text, Verdict, listed, number, numbers_in, say, where
from bagu.lab.plot import Line, Panel, Rule
from bagu.serve.replicas.load import ReplicaLoad, least_wait
from bagu.serve.replicas.scale import Scaler
from bagu.serve.replicas.simulate import (
    COST,
    OUTPUT,
    PROMPT,
    Scaling,
    Signal,
    SimulatedReplica,
    SimulatedRequest,
    quantile,
    simulate,
)

MOST, START_S = 8, 10.0  # replicas, and the seconds until one that is started takes requests
LEAST_WORK, MOST_WORK, PERIOD_S = 0.5, 4.5, 1200.0  # replicas' worth of requests, in a wave
MEANS = {"short": (0.5,), "long": (5.0,), "both": (0.5, 5.0)}  # seconds of a request; of both, half the work each
NAMES = {"short": "短请求", "long": "长请求", "both": "长短混合"}
SPREAD = 0.8  # of the lognormal sizes
TARGET_S = 20.0  # p99 of the wait until a prompt begins
THRESHOLDS = {
    "queue": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
    "wait": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
}
CLOSE = 1.05  # of the replicas of the other signal: more counts as dearer


def queue_length(loads: Sequence[ReplicaLoad], output: float, now: float) -> float:
    return sum(max(0, load.choices - load.slots) for load in loads) / len(loads)


SIGNALS: dict[str, Signal] = {"queue": queue_length, "wait": least_wait}


def requests_in_waves(means: Sequence[float], seconds: float, seed: int) -> list[SimulatedRequest]:
    """Poisson arrivals whose work rises and falls between LEAST_WORK and MOST_WORK replicas' worth."""
    draw, now, found = Random(seed), 0.0, list[SimulatedRequest]()
    rates = [MOST_WORK / len(means) / mean for mean in means]  # the highest
    while True:
        now += draw.expovariate(sum(rates))
        if now > seconds:
            return found
        wave = (1 - math.cos(2 * math.pi * now / PERIOD_S)) / 2
        if draw.random() > (LEAST_WORK + (MOST_WORK - LEAST_WORK) * wave) / MOST_WORK:
            continue
        size = draw.choices(means, rates)[0] * math.exp(SPREAD * draw.gauss(0, 1) - SPREAD**2 / 2)
        found.append(SimulatedRequest(now, max(2, round(PROMPT * size)), max(1, round(OUTPUT * size))))


def run(setting: Setting) -> Iterator[Row]:
    periods, seeds, skip = (0.5, (0,), 3) if setting.quick else (1.0, (0, 1, 2), 1)
    means = {"long": MEANS["long"]} if setting.quick else MEANS
    points = [(load, kind, at) for load in means for kind, several in THRESHOLDS.items() for at in several[::skip]]
    for (load, kind, threshold), seed in setting.track(list(product(points, seeds))):
        requests = requests_in_waves(means[load], periods * PERIOD_S, seed)
        replicas = [SimulatedReplica(cost=COST) for _ in range(MOST)]
        scaling = Scaling(Scaler(1, MOST, grow_wait_s=threshold), replicas, START_S, SIGNALS[kind])
        found = simulate(requests, replicas, "finish", scaling=scaling, output=float(OUTPUT))
        waits = [o.first_token - COST.prompt * r.prompt for o, r in zip(found, requests, strict=True)]
        yield {
            "load": load,
            "signal": kind,
            "threshold": threshold,
            "seed": seed,
            "wait_p99_s": max(0.0, quantile(waits, 0.99)),
            "replicas": scaling.paid / scaling.next_tick,
            "starts_per_hour": 3600 * scaling.starts / scaling.next_tick,
        }


def middle(rows: Sequence[Row], key: str, load: str, signal: str, threshold: float) -> float:
    """The median over the seeds."""
    return quantile([number(r, key) for r in where(rows, load=load, signal=signal, threshold=threshold)], 0.5)


def cheapest(rows: Sequence[Row], signal: str, loads: Sequence[str]) -> tuple[float, float] | None:
    """The threshold that keeps the target under all of these loads with the fewest replicas, and their mean number;
    None if none does."""
    able = []
    for threshold in numbers_in(where(rows, signal=signal), "threshold"):
        if all(middle(rows, "wait_p99_s", load, signal, threshold) <= TARGET_S for load in loads):
            replicas = [middle(rows, "replicas", load, signal, threshold) for load in loads]
            able.append((sum(replicas) / len(loads), threshold))
    return min(able)[::-1] if able else None


def cost(found: tuple[float, float] | None) -> float:
    return math.inf if found is None else found[1]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if one length of the queue keeps the target under all loads with about the replicas of one predicted wait;
    holds only where if a length of its own for each load does."""
    loads = [load for load in MEANS if where(rows, load=load)]
    one = {signal: cheapest(rows, signal, loads) for signal in SIGNALS}
    own = {signal: [cheapest(rows, signal, [load]) for load in loads] for signal in SIGNALS}
    if one["wait"] is None:
        return Verdict.say(
            "not decided", "No predicted wait keeps the target.", "没有一个预测等待阈值能达到目标。"
        ).undecided(f"a target above {TARGET_S:g} s, or more replicas", f"高于 {TARGET_S:g} 秒的目标，或更多副本")
    each = [cost(a) <= CLOSE * cost(b) < math.inf for a, b in zip(own["queue"], own["wait"], strict=True)]
    kind: Kind = (
        "held"
        if cost(one["queue"]) <= CLOSE * cost(one["wait"])
        else ("holds only where" if any(each) else "did not hold")
    )
    said = [
        say(
            "{load}: {q} by queue, {w} by wait",
            "{load}：按队列 {q}，按等待 {w}",
            load=Text(load, NAMES[load]),
            q=_shown(a),
            w=_shown(b),
        )
        for load, a, b in zip(loads, own["queue"], own["wait"], strict=True)
    ]
    return Verdict.say(
        kind,
        "Mean replicas (threshold) with one threshold for all loads: by the length of the queue {q}, by the predicted "
        "wait {w}. With one for each load: {said}.",
        "平均副本数（阈值），所有负载用一个阈值：按队列长度 {q}，按预测等待 {w}。每种负载各用一个：{said}。",
        q=_shown(one["queue"]),
        w=_shown(one["wait"]),
        said=listed(said, "; ", "；"),
    )


def _shown(found: tuple[float, float] | None) -> Text:
    return Text("none is enough", "都不够") if found is None else Text(*[f"{found[1]:.2f} ({found[0]:g})"] * 2)


def plot(rows: Sequence[Row]) -> list[Panel]:
    panels = []
    for load in dict.fromkeys(str(row["load"]) for row in rows):
        lines = []
        for i, signal in enumerate(SIGNALS):
            at = numbers_in(where(rows, signal=signal, load=load), "threshold")
            x, y = ([middle(rows, key, load, signal, t) for t in at] for key in ("replicas", "wait_p99_s"))
            lines.append(Line(x, y, signal, "o-", i))
        panels.append(Panel([*lines, Rule(TARGET_S)], load, "replicas, mean", "wait, p99, s", yscale="log"))
    return panels


LAB = Claim(
    title_en="Autoscaling",
    title_zh="自动扩缩",
    claim_en="The length of the queue says when another replica is needed.",
    claim_zh="队列长度说明何时需要再加一个副本。",
    regime=f"1 to {MOST} equal replicas that run one request after the other and take {START_S:g} s to start; work of "
    f"{LEAST_WORK:g} to {MOST_WORK:g} replicas in waves of {PERIOD_S:g} s, Poisson arrivals, lognormal sizes; the "
    "lengths of outputs are not known before.",
    varies="The signal, waiting requests for each replica or predicted wait, and its threshold; requests of 0.5 s, "
    "of 5 s, and of both, half the work each.",
    measures="Mean number of replicas with the cheapest threshold that keeps the p99 of the wait until a prompt begins "
    f"at {TARGET_S:g} s or less under every load. Good enough: at most {CLOSE} of the replicas by predicted wait.",
)
