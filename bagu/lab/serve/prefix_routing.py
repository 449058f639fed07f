"""Where a request goes if several replicas cache prefixes: to the cache, to the shortest queue, or by prediction.

    affinity   of the replicas that have most of the prompt cached, the one with the shortest queue
    queue      the shortest queue
    finish     least predicted finish: wait + prefill of what is not cached + decode (serve/replicas)

The router is the server's own; the replicas only count time (serve/replicas/simulate.py).
"""

from collections.abc import Iterator, Sequence
from itertools import product

from bagu.lab.core import Claim, Row, Setting, Text, Verdict, listed, number, say, share_met, where
from bagu.lab.plot import Bars, Panel
from bagu.serve.replicas.load import Ask
from bagu.serve.replicas.router import Candidate, Choice, Router
from bagu.serve.replicas.simulate import COST, SimulatedReplica, poisson_requests, quantile, simulate

ROUTERS = ("affinity", "queue", "finish")
REPLICAS, SHARED = 4, 0.9  # equal replicas; the part of a prompt that is common to its group
ROOM, RATE = 12, 3.4  # prefixes that a replica caches, and requests a second
LOADS = {"40 prefixes": 40, "one prefix for all": 1}
NAMES = {"40 prefixes": "40 个前缀", "one prefix for all": "所有请求同一前缀"}
FASTER = 0.9  # of the tail latency of the shortest queue: less counts as faster


class Affinity(Router):
    """The replica with the longest cached prefix; of equal ones the shortest queue."""

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Choice:
        most = max(candidate.cached for candidate in candidates)
        return Router("queue").choose([c for c in candidates if c.cached == most], ask, now)


def run(setting: Setting) -> Iterator[Row]:
    count, seeds = (400, (0,)) if setting.quick else (4000, (0, 1, 2))
    for (load, groups), seed in setting.track(list(product(LOADS.items(), seeds))):
        requests = poisson_requests(count, RATE, groups=groups, shared=SHARED, seed=seed)
        for name in ROUTERS:
            router = Affinity() if name == "affinity" else Router(name, seed)
            replicas = [SimulatedReplica(cost=COST, room=ROOM) for _ in range(REPLICAS)]
            found = simulate(requests, replicas, router)
            busiest = max(sum(o.replica == k for o in found) for k in range(REPLICAS))
            yield {
                "load": load,
                "router": name,
                "seed": seed,
                "ttft_p50_s": quantile([o.first_token for o in found], 0.5),
                "ttft_p99_s": quantile([o.first_token for o in found], 0.99),
                "cached_percent": 100 * sum(o.cached for o in found) / sum(r.prompt for r in requests),
                "busiest_percent": 100 * busiest / len(found),
            }


def tail(rows: Sequence[Row], load: str, router: str) -> float:
    """The median over the seeds."""
    return quantile([number(row, "ttft_p99_s") for row in where(rows, load=load, router=router)], 0.5)


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if affinity is faster than the shortest queue under every load."""
    met, said = [], []
    for load in dict.fromkeys(str(row["load"]) for row in rows):
        affinity, queue, finish = (tail(rows, load, router) for router in ROUTERS)
        met.append(affinity <= FASTER * queue)
        said.append(
            say(
                "{load}: {a:.1f} s by affinity, {q:.1f} by queue, {f:.1f} by prediction",
                "{load}：按缓存 {a:.1f} 秒，按队列 {q:.1f}，按预测 {f:.1f}",
                load=Text(load, NAMES[load]),
                a=affinity,
                q=queue,
                f=finish,
            )
        )
    return Verdict.say(
        share_met(met),
        "Time to the first token at p99: {said}.",
        "首个 token 时间的 p99：{said}。",
        said=listed(said, "; ", "；"),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    loads = list(dict.fromkeys(str(row["load"]) for row in rows))
    return [
        Panel(
            [Bars([tail(rows, load, router) for router in ROUTERS], text="{:.1f}")],
            load,
            "",
            "time to the first token, p99, s",
            yscale="log",
            xnames=ROUTERS,
        )
        for load in loads
    ]


LAB = Claim(
    title_en="Routing by prefix",
    title_zh="按前缀路由",
    claim_en="A request should go to the replica that has its prefix in the cache.",
    claim_zh="请求应当发给缓存了其前缀的副本。",
    regime=f"{REPLICAS} equal replicas that run one request after the other, Poisson arrivals, lognormal sizes, "
    f"{SHARED:.0%} of a prompt common to its group; a replica caches {ROOM} prefixes.",
    varies="40 prefixes or one that all requests share; the router: longest cached prefix, shortest queue, least "
    "predicted finish.",
    measures="Time to the first token at p99, cached tokens, share of the busiest replica. Faster: at most "
    f"{FASTER} of the shortest queue's.",
)
