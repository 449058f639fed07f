"""Three replicas of unlike speed under `bagu bench serve`'s load, once with each router; predicted beside measured.

>>> python -m benchmarks.tools.unlike_replicas runs/demo/grpo --rounds 3
>>> python -m benchmarks.tools.unlike_replicas --simulate

The engines have one thread each and are slowed to the given shares of the time by SIGSTOP and SIGCONT, after they have
measured their speed: the profiles are wrong by these factors, and the corrections of /metrics say what the router has
found. The rate is a share of what the three do in a closed loop.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bagu.bench.serve_client import Server
from bagu.bench.serve_load import Load, connect, run_load
from bagu.bench.workload import Lengths
from bagu.recipes.demo_server import running_server
from bagu.serve.replicas.router import POLICIES
from bagu.serve.replicas.simulate import COST, SimulatedReplica, poisson_requests, quantile, simulate

PERIOD_S = 0.04


def engines() -> list[int]:
    """The engine processes of the server that this process has started, in the order of their start."""
    found = []
    for server in _children(os.getpid()):
        found += [pid for pid in _children(server) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return sorted(found)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@contextmanager
def slowed(pids: Sequence[int], shares: Sequence[float]) -> Iterator[None]:
    """Let process i run for shares[i] of the time."""
    ended = threading.Event()

    def run(pid: int, share: float) -> None:
        while not ended.is_set():
            time.sleep(PERIOD_S * share)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            os.kill(pid, signal.SIGCONT)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(pids, shares, strict=True) if pair[1] < 1]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def replica_metric(url: str, name: str) -> list[float]:
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return [float(value) for value in re.findall(rf"^bagu:replica_{name}{{.*}} (\S+)$", text, re.M)]


def predicted_and_measured(url: str) -> tuple[float, float]:
    """Sums of the seconds to the first tokens, over all replicas."""
    names = ("predicted_first_token_seconds_total", "measured_first_token_seconds_total")
    return tuple(sum(replica_metric(url, name)) for name in names)  # type: ignore[return-value]


def cache_counts(url: str) -> list[float]:
    """Tokens found in the prefix caches, and tokens looked up there."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    found = [re.findall(rf"^vllm:prefix_cache_{name}_total{{.*}} (\S+)$", text, re.M) for name in ("hits", "queries")]
    return [sum(map(float, values)) for values in found]


def measure(model: Path, router: str, rate: float | None, given: argparse.Namespace, seed: int) -> dict[str, float]:
    """One server with this router: the latencies at `rate`, or in a closed loop that keeps all replicas busy."""
    options = ("--replicas", f"{len(given.shares)}x cpu:1", "--router", router, "--max-num-seqs", "1",
               "--num-blocks", "512")  # fmt: skip
    with running_server(model, *options) as url, slowed(engines(), given.shares):
        target = connect(Server(url, None), None, 0)
        shape = {"inputs": given.inputs, "outputs": given.outputs, "shared_prefix": given.shared_prefix,
                 "prefix_groups": given.prefix_groups}  # fmt: skip
        run_load(target, Load(requests=10 * len(given.shares), max_concurrency=6, warmups=1, seed=1000 + seed, **shape))
        before, counts = predicted_and_measured(url), cache_counts(url)
        if rate is None:
            load = Load(requests=given.requests // 2, max_concurrency=2 * len(given.shares), seed=seed, **shape)
        else:
            load = Load(requests=given.requests, request_rate=rate, seed=seed, **shape)
        row, answers = run_load(target, load)
        after = predicted_and_measured(url)
        cached = [now - then for now, then in zip(cache_counts(url), counts, strict=True)]
        share = cached[0] / max(1.0, cached[1])
        first = [a.times[0] - a.asked for a in answers if a.times]
        print(
            f"{router:7s} p50 {1e3 * statistics.median(first):7.0f} ms, p99 {row['p99_ttft_ms']:7.0f} ms to the first "
            f"token; mean predicted {1e3 * (after[0] - before[0]) / len(first):6.0f}, measured "
            f"{1e3 * (after[1] - before[1]) / len(first):6.0f} ms; {row['request_throughput']:.2f} requests/s, failed "
            f"{row['failed']}; cached {share:.3f}; sent "
            f"{[int(x) for x in replica_metric(url, 'requests_total')]}, corrections "
            f"{[round(x, 2) for x in replica_metric(url, 'correction')]}, profile errors "
            f"{[round(x, 2) for x in replica_metric(url, 'profile_error')]}",
            flush=True,
        )
        return {"p99": row["p99_ttft_ms"], "rate": row["request_throughput"], "cached": share}


def simulated(count: int = 3000) -> None:
    """The same with replicas that only count time: speeds 1, 1/2, 1/4."""
    for load in (0.5, 0.7, 0.85):
        for router in POLICIES:
            replicas = [SimulatedReplica(cost=COST.scaled(factor)) for factor in (1, 2, 4)]
            found = simulate(poisson_requests(count, load * 1.75), replicas, router)[count // 10 :]
            first = [outcome.first_token for outcome in found]
            p50, p99 = quantile(first, 0.5), quantile(first, 0.99)
            print(f"load {load:.2f} {router:7s} {p50:7.1f} / {p99:7.1f} s to the first token", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, nargs="?", default=Path("runs/demo/grpo"))
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--shares", type=lambda t: [float(x) for x in t.split(",")], default=[0.8, 0.4, 0.2])
    parser.add_argument("--routers", default="p2c,queue,finish")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--rate", type=float, help="requests/s, instead of a share of the closed loop's")
    parser.add_argument("--requests", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--inputs", type=Lengths.parse, default=Lengths(16, 64))
    parser.add_argument("--outputs", type=Lengths.parse, default=Lengths(8, 64))
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--prefix-groups", type=int, default=1)
    given = parser.parse_args()
    if given.simulate:
        simulated()
        return
    rate = given.rate or given.load * measure(given.model, "finish", None, given, 0)["rate"]
    print(f"rate: {rate:.2f} requests/s")
    found: dict[str, list[float]] = {router: [] for router in given.routers.split(",")}
    for seed in range(1, given.rounds + 1):
        for router, values in found.items():
            values.append(measure(given.model, router, rate, given, seed)["p99"])
    best = statistics.median(found["finish"]) if "finish" in found else None
    for router, values in found.items():
        ratio = "" if best is None else f", finish over it {best / statistics.median(values):.2f}"
        print(f"{router:7s} median p99 {statistics.median(values):.0f} ms{ratio}")


if __name__ == "__main__":
    main()
