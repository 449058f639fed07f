"""A parameter server beside all-reduce: four workers with equal step times, and with times that vary.

Real servers, sockets and collectives; a step is a wait (its time) and a small model, so that the processes do not
compete for the cores of one machine.
"""

from collections.abc import Iterator, Sequence

from bagu.bench.parameter_server import SIGMA, jittered, processes
from bagu.lab.core import Claim, Row, Setting, Verdict, column, number, share_met, where
from bagu.lab.plot import Bars, Panel
from bagu.parallel.local_ranks import on_ranks
from bagu.train.served.config import ServedConfig

WORKERS, SERVERS = 4, 3
STEPS = {"equal": 0.0, "jitter": SIGMA}
WAYS = ("all-reduce", "server, delay 0", "server, delay 8")


def run(setting: Setting) -> Iterator[Row]:
    updates = 10 if setting.quick else 60
    for name, way in setting.track([(name, way) for name in STEPS for way in WAYS]):
        served = ServedConfig(servers=SERVERS, workers=WORKERS, delay=8 if way.endswith("8") else 0)
        if way == "all-reduce":
            found = on_ranks(WORKERS, jittered, None, served, updates, STEPS[name])
        else:
            with processes(SERVERS) as place:
                found = on_ranks(WORKERS, jittered, place, served, updates, STEPS[name])
        yield {"steps": name, "way": way, "updates_per_s": min(each["rate"] for each in found)}


def _ratio(rows: Sequence[Row], name: str, way: str) -> float:
    base, other = (number(where(rows, steps=name, way=w)[0], "updates_per_s") for w in (WAYS[0], way))
    return other / base


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the better of both delays is slower than all-reduce, for equal times and for times that vary."""
    ratios = {(name, way): _ratio(rows, name, way) for name in STEPS for way in WAYS[1:]}
    met = [max(ratios[name, way] for way in WAYS[1:]) < 1 for name in STEPS]
    return Verdict.say(
        share_met(met),
        "Updates per second over all-reduce, delay 0 and 8: equal steps ×{a:.2f}, ×{b:.2f}; jitter ×{c:.2f}, ×{d:.2f}.",
        "每秒更新数与 all-reduce 之比，延迟 0 与 8：步长相同 ×{a:.2f}、×{b:.2f}；有抖动 ×{c:.2f}、×{d:.2f}。",
        a=ratios["equal", WAYS[1]],
        b=ratios["equal", WAYS[2]],
        c=ratios["jitter", WAYS[1]],
        d=ratios["jitter", WAYS[2]],
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = [Bars(column(where(rows, steps=name), "updates_per_s"), f"{name} steps", text="{:.2f}") for name in STEPS]
    return [Panel(bars, "Four workers", "", "updates/s", xnames=WAYS)]


LAB = Claim(
    title_en="Server or all-reduce",
    title_zh="参数服务器还是 all-reduce",
    claim_en="A parameter server is slower than all-reduce.",
    claim_zh="参数服务器比 all-reduce 慢。",
    regime="Four workers and three servers as processes of one machine; a step waits 0.15 s and computes little.",
    varies="Steps of equal time, and lognormal ones (σ 0.6); all-reduce by Gloo, servers with delay 0 and 8.",
    measures="Updates per second over those of all-reduce. Slower: below 1 at both delays.",
    evidence="timing",
)
