"""Three replicas of unlike speed under `bagu bench serve`'s load, once with each router; predicted beside measured.

>>> python -m benchmarks.tools.unlike_replicas runs/demo/grpo --rounds 3
>>> python -m benchmarks.tools.unlike_replicas --direct --rounds 3
>>> python -m benchmarks.tools.unlike_replicas --simulate

The engines have one thread each and are slowed to the given shares of the time by SIGSTOP and SIGCONT, after they have
measured their speed: the profiles are wrong by these factors, and the corrections of /metrics say what the router has
found. The rate is a share of what the three do in a closed loop. `--direct` runs the replicas of a model with random
weights in this process, without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import statistics
import threading
import time
import urllib.request
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random

from bagu.bench.serve_client import Server
from bagu.bench.serve_load import Load, connect, run_load
from bagu.bench.workload import Lengths
from bagu.recipes.demo_server import running_server
from bagu.serve.config import EngineConfig
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.pending import PendingCalls
from bagu.serve.replicas.options import ReplicaOptions
from bagu.serve.replicas.replica_set import ReplicaSet
from bagu.serve.replicas.router import POLICIES
from bagu.serve.replicas.simulate import COST, SimulatedReplica, poisson_requests, quantile, simulate
from bagu.serve.request import Request, Sampling
from benchmarks.tools.gpu_beside_cpu import Bench, Size
from benchmarks.tools.gpu_beside_cpu import load as load_model

PERIOD_S = 0.04
DIRECT = Size(hidden=256, layers=6)  # 6.6 M parameters, about the demo's


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


def measure_direct(router: str, rate: float | None, given: argparse.Namespace, seed: int) -> dict[str, float]:
    """The same without HTTP: the requests go to `ReplicaSet` (gpu_beside_cpu.py)."""

    async def run() -> dict[str, float]:
        plan = ReplicaOptions(replicas=f"{len(given.shares)}x cpu:1", router=router).replication(cores=64, gpus=0)
        assert plan is not None
        config = EngineConfig(max_num_seqs=1, num_blocks=512, block_size=16)
        specs = plan.specs(config, sorted(os.sched_getaffinity(0)), lambda device: partial(load_model, DIRECT, device))
        engines = ReplicaSet(specs, PendingCalls(1 << 20, Metrics("bench")), router=router)
        engines.start()
        await engines.wait_until_settled()
        pids = [r.process.pid for r in engines.replicas if r.process is not None and r.process.pid is not None]
        bench = Bench(engines, DIRECT.vocab)
        count = given.requests if rate is not None else given.requests // 2

        def send() -> Awaitable[None]:
            requests = _requests(given, count, seed)
            return bench.open_loop(requests, rate or 0.0, seed)

        try:
            with slowed(pids, given.shares):
                await bench.open_loop(_requests(given, 10 * len(pids), 1000 + seed), 0.0, 0)
                before = await engines.stats()
                found = await bench.run(router, True, send, seed)
                after = await engines.stats()
        finally:
            await engines.stop()
        assert before is not None and after is not None
        asked = after.prefix_queries - before.prefix_queries
        cached = (after.prefix_hits - before.prefix_hits) / max(1, asked)
        factors = [round(r.load.correction.factor, 2) for r in engines.replicas if r.load is not None]
        print(
            f"{router:7s} p50 {found.ttft_p50_ms:7.0f} ms, p99 {found.ttft_p99_ms:7.0f} ms to the first token; mean "
            f"predicted {found.predicted_ttft_ms:6.0f}, measured {found.mean_ttft_ms:6.0f} ms; "
            f"{found.requests_per_s:.2f} requests/s; cached {cached:.3f}; sent {found.sent}, corrections {factors}",
            flush=True,
        )
        return {"p99": found.ttft_p99_ms, "rate": found.requests_per_s, "cached": cached}

    return asyncio.run(run())


def _requests(given: argparse.Namespace, count: int, seed: int) -> list[Request]:
    """Prompts that begin with the prefix of a group and end in tokens of their own."""
    draw, found = Random(seed), list[Request]()
    for i in range(count):
        group = Random(-1 - draw.randrange(given.prefix_groups))
        prefix = [group.randrange(3, DIRECT.vocab) for _ in range(given.shared_prefix)]
        own = [draw.randrange(3, DIRECT.vocab) for _ in range(draw.randint(given.inputs.low, given.inputs.high))]
        tokens = draw.randint(given.outputs.low, given.outputs.high)
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        found.append(Request(id=f"{seed}-{i}", prompt=(*prefix, *own), sampling=sampling))
    return found


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
    parser.add_argument("--direct", action="store_true")
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
    one = measure_direct if given.direct else partial(measure, given.model)
    rate = given.rate or given.load * one("finish", None, given, 0)["rate"]
    print(f"rate: {rate:.2f} requests/s")
    found: dict[str, list[float]] = {router: [] for router in given.routers.split(",")}
    for seed in range(1, given.rounds + 1):
        for router, values in found.items():
            values.append(one(router, rate, given, seed)["p99"])
    best = statistics.median(found["finish"]) if "finish" in found else None
    for router, values in found.items():
        ratio = "" if best is None else f", finish over it {best / statistics.median(values):.2f}"
        print(f"{router:7s} median p99 {statistics.median(values):.0f} ms{ratio}")


if __name__ == "__main__":
    main()
