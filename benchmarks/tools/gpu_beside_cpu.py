"""The first replica alone, and with all others beside it: rate and time to the first token, without HTTP.

>>> python -m benchmarks.tools.gpu_beside_cpu --replicas "cuda,cpu:2"
>>> python -m benchmarks.tools.gpu_beside_cpu --replicas "cpu:1,cpu:1" --hidden 128 --layers 4 --requests 100

All engines of the list run from the start to the end, with random weights; "alone" means that the others get no
requests. Both run in turn under the same loads:

    burst     all requests at once, until the last has ended: others help, and one request too many there ends last
    closed    clients that send one request after the other, twice as many as the first replica has slots
    poisson   arrivals at a share of the rate that the first replica had in its burst
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bagu.parallel.unlike.profile import Step
from bagu.serve.config import EngineConfig
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.pending import PendingCalls
from bagu.serve.replicas.options import ReplicaOptions
from bagu.serve.replicas.replica_set import ReplicaSet
from bagu.serve.replicas.simulate import quantile
from bagu.serve.request import Request, Sampling

PROMPTS, OUTPUTS = (16, 256), (16, 96)  # tokens
MAX_LEN = 512


@dataclass(frozen=True, kw_only=True)
class Size:
    """The shape of the model."""

    hidden: int
    layers: int
    vocab: int = 4096


def load(size: Size, device: str) -> Any:
    """A model with random weights; called in the engine process."""
    import torch

    from bagu.data.tokenizer import BpeTokenizer
    from bagu.nn import ModelConfig, Transformer, init_weights

    heads = size.hidden // 64
    config = ModelConfig(
        vocab_size=size.vocab, hidden_size=size.hidden, num_layers=size.layers, num_heads=heads, num_kv_heads=heads,
        head_dim=64, intermediate_size=8 * size.hidden // 3 // 64 * 64, max_len=MAX_LEN,
    )  # fmt: skip
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    model = init_weights(Transformer(config, device=device, dtype=dtype), 0).eval()
    return model, BpeTokenizer.train(["hello world"], vocab_size=300), None


@dataclass(frozen=True, kw_only=True)
class Found:
    """One load on one choice of replicas."""

    engines: str
    load: str
    round: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    predicted_ttft_ms: float  # means, beside the measured one
    mean_ttft_ms: float
    sent: tuple[int, ...]  # to each replica


class Bench:
    def __init__(self, engines: ReplicaSet, vocab: int) -> None:
        self.engines, self.vocab, self._number = engines, vocab, 0
        self._first: list[float] = []  # seconds to the first tokens
        self._tokens = self._ended = 0

    def requests(self, count: int, seed: int) -> list[Request]:
        """The lengths are those of the seed. Tokens are never the same again: no prefix is cached."""
        draw, found = random.Random(seed), list[Request]()
        for _ in range(count):
            self._number += 1
            word = random.Random(self._number)
            prompt = tuple(word.randrange(3, self.vocab) for _ in range(draw.randint(*PROMPTS)))
            sampling = Sampling(max_tokens=draw.randint(*OUTPUTS), temperature=0.0, ignore_eos=True)
            found.append(Request(id=f"r{self._number}", prompt=prompt, sampling=sampling))
        return found

    async def run(self, load: str, beside: bool, send: Callable[[], Awaitable[None]], round: int) -> Found:
        """`send` sends requests and waits for their tokens."""
        for replica in self.engines.replicas[1:]:
            replica.is_draining = not beside
        before, self._first, self._tokens, self._ended = self._totals(), [], 0, 0
        begun = time.perf_counter()
        await send()
        seconds = time.perf_counter() - begun
        change = [b - a for a, b in zip(before, self._totals(), strict=True)]
        return Found(
            engines="all" if beside else "first", load=load, round=round, requests_per_s=self._ended / seconds,
            tokens_per_s=self._tokens / seconds, ttft_p50_ms=1e3 * quantile(self._first, 0.5),
            ttft_p99_ms=1e3 * quantile(self._first, 0.99), predicted_ttft_ms=1e3 * change[0] / len(self._first),
            mean_ttft_ms=1e3 * change[1] / len(self._first), sent=tuple(map(int, change[2:])),
        )  # fmt: skip

    async def open_loop(self, requests: Sequence[Request], rate: float, seed: int) -> None:
        """Send the requests at Poisson times, or at once with rate 0; until the last token."""
        draw, at, calls, begun = random.Random(seed), 0.0, list[asyncio.Task[None]](), time.perf_counter()
        for request in requests:
            at += draw.expovariate(rate) if rate else 0.0
            if (pause := begun + at - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            calls.append(asyncio.create_task(self._call(request)))
        await asyncio.gather(*calls)

    async def closed_loop(self, clients: int, seconds: float, seed: int) -> None:
        """What has not ended after so many seconds is aborted; its tokens count."""

        async def client(number: int) -> None:
            while True:
                for request in self.requests(8, 1000 * seed + number):
                    await self._call(request)

        tasks = [asyncio.create_task(client(number)) for number in range(clients)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call(self, request: Request) -> None:
        begun, first, call = time.perf_counter(), False, self.engines.submit([request])
        try:
            while events := await call.read():
                if not first:
                    first = True
                    self._first.append(time.perf_counter() - begun)
                self._tokens += len(events)
            self._ended += 1
        finally:
            self.engines.close(call)

    def _totals(self) -> list[float]:
        replicas = self.engines.replicas
        loads = [replica.load for replica in replicas]
        sums = [sum(r.predicted_s for r in replicas), sum(r.measured_s for r in replicas)]
        return [*sums, *(load.given if load is not None else 0 for load in loads)]


async def main(given: argparse.Namespace) -> None:
    size, cores = Size(hidden=given.hidden, layers=given.layers), sorted(os.sched_getaffinity(0))
    plan = ReplicaOptions(replicas=given.replicas).replication(cores=len(cores), gpus=given.replicas.count("cuda"))
    assert plan is not None
    config = EngineConfig(max_num_seqs=given.slots, num_blocks=given.slots * MAX_LEN // 16, block_size=16)
    specs = plan.specs(config, cores, lambda device: partial(load, size, device))
    engines = ReplicaSet(specs, PendingCalls(1 << 20, Metrics("bench")))
    begun = time.perf_counter()
    engines.start()
    await engines.wait_until_settled()
    print(f"{given.replicas}: ready after {time.perf_counter() - begun:.1f} s: {engines.describe()}", flush=True)
    try:
        _speeds(engines)
        found = await _compare(Bench(engines, size.vocab), given)
    finally:
        await engines.stop()
    if given.out is not None:
        with given.out.open("a") as file:
            file.writelines(json.dumps({"replicas": given.replicas, **asdict(each)}) + "\n" for each in found)
    for name in dict.fromkeys(each.load for each in found):
        pairs = [[f for f in found if (f.load, f.engines) == (name, kind)] for kind in ("all", "first")]
        rate = statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in zip(*pairs, strict=True))
        p99 = statistics.median(a.ttft_p99_ms / b.ttft_p99_ms for a, b in zip(*pairs, strict=True))
        print(
            f"{name}: all over the first alone, median of rounds: tokens/s {rate:.3f}, p99 to the first token {p99:.3f}"
        )


def _speeds(engines: ReplicaSet) -> None:
    """What the profiles say of a prompt of 128 tokens and of a decode."""
    steps = (Step.of_prompt(128), Step.of_decodes([128]))
    times = [[1e3 * r.load.cost.seconds(step) for step in steps] for r in engines.replicas if r.load is not None]
    for replica, (prompt, decode) in zip(engines.replicas, times, strict=True):
        print(f"  {replica.spec.name}: prompt of 128 {prompt:.2f} ms, decode {decode:.2f} ms", end="; ")
        print(f"slower than the first {prompt / times[0][0]:.0f}x, {decode / times[0][1]:.0f}x", flush=True)


async def _compare(bench: Bench, given: argparse.Namespace) -> list[Found]:
    found, few = list[Found](), max(8, given.requests // 8)
    for round in (0, 1):  # caches of the allocator, corrections
        await _both(bench, "warm-up", round, lambda: bench.open_loop(bench.requests(few, 0), 0.0, 0))
    for round in range(1, given.rounds + 1):
        found += await _round(bench, given, round)
    return found


async def _round(bench: Bench, given: argparse.Namespace, round: int) -> list[Found]:
    clients, seconds = 2 * given.slots, given.seconds
    found = await _both(
        bench, "burst", round, lambda: bench.open_loop(bench.requests(given.requests, round), 0.0, round)
    )
    rate = given.load * next(f.requests_per_s for f in found if f.engines == "first")
    count = max(20, int(rate * seconds))
    found += await _both(bench, "closed", round, lambda: bench.closed_loop(clients, seconds, round))
    found += await _both(
        bench, "poisson", round, lambda: bench.open_loop(bench.requests(count, 100 + round), rate, round)
    )
    return found


async def _both(bench: Bench, load: str, round: int, send: Callable[[], Awaitable[None]]) -> list[Found]:
    """The load on the first replica and on all, in an order that alternates."""
    found = []
    for beside in (False, True) if round % 2 else (True, False):
        found.append(await bench.run(load, beside, send, round))
        print(json.dumps(asdict(found[-1])), flush=True)
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", default="cuda,cpu:2")
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--slots", type=int, default=32, help="max_num_seqs of every engine")
    parser.add_argument("--requests", type=int, default=600, help="of a burst")
    parser.add_argument("--load", type=float, default=0.7, help="of the Poisson arrivals, over the rate of a burst")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the closed loop and of the Poisson arrivals")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="append the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(arguments()))
