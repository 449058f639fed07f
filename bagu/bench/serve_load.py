"""One load on one server: connect, draw the requests, warm up, send, and summarize.

Prompts are token ids, so that their lengths are exact on every server with `/tokenize` (bagu, vLLM). Other servers get
texts of short words, about one token each; the token counts in the results are those that the server reports.
"""

import asyncio
import math
import random
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bagu.bench.serve_client import Answer, Server, answered, drive
from bagu.bench.serve_latency import METRICS, summary
from bagu.bench.trace import Trace, trace_workload
from bagu.bench.workload import Lengths, Workload, arrivals, random_workload
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.serve.api_client import Refused

DEFAULT = Lengths(32, 128)  # tokens of a prompt, and of an output
REQUESTS = 64
CONCURRENCY = 8
WORDS = tuple("".join(random.Random(f"word {i}").choices(string.ascii_lowercase, k=4)) for i in range(500))


@dataclass(frozen=True, kw_only=True)
class Load:
    """The requests to send: a closed loop of `max_concurrency` clients, unless `request_rate` is finite (Poisson) or
    `trace` is given (its arrivals, `speed` times as fast); `max_concurrency` then limits the requests in flight.

    `requests` None is 64, or all of the trace. `inputs` and `outputs` None are chosen for the model.
    """

    requests: int | None = None
    inputs: Lengths | None = None
    outputs: Lengths | None = None
    shared_prefix: int = 0
    prefix_groups: int = 1  # different shared prefixes
    max_concurrency: int | None = None
    request_rate: float = math.inf
    trace: Trace | None = None
    speed: float = 1.0
    temperature: float = 0.0
    goodput: Mapping[str, float] = field(default_factory=dict)  # milliseconds by metric
    warmups: int = 1
    timeout_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, count in {"requests": self.requests, "max_concurrency": self.max_concurrency}.items():
            if count is not None and count < 1:
                raise ArgumentError(f"{name} is {count}", hint="use 1 or more")
        for name, count in {"warmups": self.warmups, "shared_prefix": self.shared_prefix}.items():
            if count < 0:
                raise ArgumentError(f"{name} is {count}", hint="use 0 or more")
        if not self.timeout_s > 0:
            raise ArgumentError(f"a timeout of {self.timeout_s} s", hint="use a time above 0")
        if not self.request_rate > 0:
            raise ArgumentError(f"a request rate of {self.request_rate} per second", hint="use a rate above 0")
        if not 0 < self.speed < math.inf:
            raise ArgumentError(f"a trace at {self.speed} times its speed", hint="use a factor above 0")
        if self.trace is not None and (self.inputs or self.outputs or self.shared_prefix or self.is_poisson):
            raise ArgumentError(
                "a trace sets the lengths and the arrival times of the requests",
                hint="leave out --inputs, --outputs, --shared-prefix and --request-rate",
            )
        if self.trace is None and self.speed != 1.0:
            raise ArgumentError("only a trace has a speed", hint="give --trace, or leave out --trace-speed")
        for name in self.goodput:
            UnknownName.check("goodput metric", name, METRICS)

    @property
    def is_poisson(self) -> bool:
        return math.isfinite(self.request_rate)

    @property
    def concurrency(self) -> int | None:
        """The limit of requests in flight; 8 for a closed loop that sets none."""
        if self.max_concurrency is None and not self.is_poisson and self.trace is None:
            return CONCURRENCY
        return self.max_concurrency

    def __str__(self) -> str:
        most = "" if self.max_concurrency is None else f", at most {self.max_concurrency} in flight"
        if self.trace is not None:
            fast = "" if self.speed == 1 else f", {self.speed:g} times as fast"
            return f"trace {self.trace.name}{fast}{most}"
        if self.is_poisson:
            return f"Poisson, {self.request_rate:g} requests/s{most}"
        return f"closed loop of {self.concurrency}"


@dataclass(frozen=True, kw_only=True)
class Target:
    """A connected server. `ids` are tokens that its model has; None if the server cannot tokenize."""

    server: Server
    model: str
    longest: int | None  # the model's maximum length, if the server reports it
    ids: tuple[int, ...] | None

    def prompt(self, tokens: Sequence[int]) -> list[int] | str:
        """The prompt field of a request: ids, or the words with these numbers."""
        return " ".join(WORDS[t] for t in tokens) if self.ids is None else list(tokens)

    @property
    def tokens(self) -> Sequence[int]:
        return range(len(WORDS)) if self.ids is None else self.ids


def connect(server: Server, model: str | None, seed: int) -> Target:
    """Ask the server for its model (by default the first), the model's maximum length, and token ids to use."""
    models = {entry["id"]: entry for entry in server.models()}
    if not models and model is None:
        raise BaguError(f"{server.url}/v1/models lists no model", hint="check that the server has loaded one")
    name = model or next(iter(models))
    return Target(
        server=server, model=name, longest=models.get(name, {}).get("max_model_len"), ids=vocabulary(server, name, seed)
    )


def vocabulary(server: Server, model: str, seed: int) -> tuple[int, ...] | None:
    """Token ids that the model has: those of random words, from the server's tokenizer. None without `/tokenize`."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_letters + string.digits, k=draw.randint(1, 8))) for _ in range(500)]
    try:
        found = server.call("/tokenize", {"model": model, "prompt": " ".join(words)})
    except Refused:
        return None
    ids = found.get("tokens") if isinstance(found, dict) else None
    return tuple(sorted(set(ids))) if ids and all(isinstance(i, int) for i in ids) else None


def same_prompts(a: Target, b: Target) -> tuple[Target, Target]:
    """Two targets that get the same prompts: token ids if both tokenize the words to the same ids, else texts."""
    if a.ids == b.ids:
        return a, b
    return tuple(Target(server=t.server, model=t.model, longest=t.longest, ids=None) for t in (a, b))  # type: ignore[return-value]


def fitting(
    inputs: Lengths | None, outputs: Lengths | None, *, longest: int | None, shared_prefix: int
) -> tuple[Lengths, Lengths]:
    """The given lengths; a missing one is DEFAULT, shortened to fit in a sequence of `longest`."""
    if longest is None or (inputs is not None and outputs is not None):
        return inputs or DEFAULT, outputs or DEFAULT
    room = longest - shared_prefix
    if inputs is None:
        inputs = _at_most(room // 2 if outputs is None else room - outputs.high, longest)
    if outputs is None:
        outputs = _at_most(room - inputs.high, longest)
    return inputs, outputs


def _at_most(room: int, longest: int) -> Lengths:
    if room < 1:
        raise ArgumentError(
            f"the lengths leave {room} tokens of the model's maximum length, {longest}",
            hint="give shorter --inputs, --outputs or --shared-prefix",
        )
    return Lengths(min(DEFAULT.low, room), min(DEFAULT.high, room))


def run_load(target: Target, load: Load) -> tuple[dict[str, Any], list[Answer]]:
    """Send the load after its warm-up requests. Returns the row of results, and all answers."""
    work, warmup, when, asked = _requests(target, load)
    server, name = target.server, target.model
    if load.warmups:
        calls = [0.0] * load.warmups
        send(target, warmup, calls, 1, load.temperature, load.timeout_s)
    before = server.cpu_seconds()
    answers, duration = send(target, work, when, load.concurrency, load.temperature, load.timeout_s)
    after = server.cpu_seconds()
    row = {"system": "serve", "model_id": name, "url": server.url, **asked, **summary(answers, duration, load.goodput)}
    made = row["total_output_tokens"]
    row["p50_engine_ttft_ms"] = server.engine_ttft_ms(row["completed"])
    used = None if before is None or after is None else after - before
    row["server_cpu_us_per_token"] = 1e6 * used / made if used is not None and made else None
    row["p99_send_lag_ms"] = _lag_ms(answers, when) if load.is_poisson or load.trace is not None else None
    return {**row, "where": server.where}, answers


def _requests(target: Target, load: Load) -> tuple[Workload, Workload, list[float], dict[str, Any]]:
    """The requests of the load and of the warm-up, the arrival times, and the fields that describe them."""
    asked: dict[str, Any] = {
        "shared_prefix": load.shared_prefix,
        "prefix_groups": load.prefix_groups,
        "request_rate": load.request_rate if load.is_poisson else "inf",
        "max_concurrency": load.concurrency,
        "temperature": load.temperature,
        "seed": load.seed,
        "warmups": load.warmups,
        "goodput": dict(load.goodput) or None,
        "prompts_are": "text" if target.ids is None else "token ids",
    }
    if load.trace is not None:
        trace = load.trace.fitting(target.longest)
        work = trace_workload(trace, tokens=target.tokens, seed=load.seed)
        lengths = Lengths(*_range(map(len, work.prompts))), Lengths(*_range(work.max_tokens))
        when = trace.arrivals(load.speed)
        asked |= {"trace": trace.name, "trace_speed": load.speed, "left_out": list(trace.left_out)}
    else:
        count = load.requests or REQUESTS
        lengths = fitting(load.inputs, load.outputs, longest=target.longest, shared_prefix=load.shared_prefix)
        work = random_workload(
            count,
            *lengths,
            tokens=target.tokens,
            shared_prefix=load.shared_prefix,
            prefix_groups=load.prefix_groups,
            seed=load.seed,
        )
        when = arrivals(count, load.request_rate, load.seed)
    warmup = random_workload(
        max(1, load.warmups), *lengths, tokens=target.tokens, shared_prefix=load.shared_prefix, seed=load.seed + 1
    )
    asked |= {"num_prompts": len(work.prompts), "inputs": str(lengths[0]), "outputs": str(lengths[1])}
    return work, warmup, when, asked


def _range(values: Any) -> tuple[int, int]:
    found = list(values)
    return min(found), max(found)


def send(
    target: Target,
    workload: Workload,
    when: Sequence[float],
    max_concurrency: int | None,
    temperature: float,
    timeout_s: float,
) -> tuple[list[Answer], float]:
    """The answer to every request, and the seconds from the first request to the last answer."""
    bodies = [
        {
            "model": target.model,
            "prompt": target.prompt(prompt),
            "max_tokens": count,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for prompt, count in zip(workload.prompts, workload.max_tokens, strict=True)
    ]
    server = target.server
    calls = [server.post("/v1/completions", body) for body in bodies]
    began = time.perf_counter()
    raw = asyncio.run(drive(server, calls, when, max_concurrency=max_concurrency, timeout_s=timeout_s))
    duration = time.perf_counter() - began
    return [answered(*one) for one in raw], duration


def _lag_ms(answers: Sequence[Answer], when: Sequence[float]) -> float:
    """By how much requests were sent after they were due, relative to the most punctual one: the 99th percentile. A
    busy client and a limit of requests in flight delay them, and latencies do not include it."""
    late = np.array([a.asked - t for a, t in zip(answers, when, strict=True)])
    return float(1e3 * np.percentile(late - late.min(), 99))
