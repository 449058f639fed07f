"""`bagu bench serve`: send load to a server and measure the latencies of its clients.

    closed loop   `max_concurrency` clients, each sends its next request when the last one has finished
    Poisson       requests arrive at `request_rate` per second, independent of the server; the gaps are exponential

serve_latency.py defines the latencies; they are those of `vllm bench serve`, and so are the fields. Two more numbers
measure the cost of HTTP, if the server reports them:

    server_cpu_us_per_token   CPU time of the server process during the load / output tokens. It includes parsing,
                              tokenization and connections, but not the engine process (process_cpu_seconds_total in
                              /metrics)
    p50_engine_ttft_ms        from the arrival of a request in the engine process to the end of the step that sampled
                              its first token, median of this load (/engine); p50_ttft_ms minus this is the cost of HTTP
"""

from __future__ import annotations

import asyncio
import math
import random
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from bagu.bench.harness import RESULTS, Rows, table
from bagu.bench.serve_client import Answer, Server, answered, drive
from bagu.bench.serve_latency import METRICS, summary
from bagu.bench.serve_plot import draw
from bagu.bench.workload import Lengths, Workload, arrivals, random_workload
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.runs.record import ensure_folder

__all__ = ["fitting", "main", "measure"]

DEFAULT = Lengths(32, 128)  # tokens of a prompt, and of an output


def main(
    url: str | None = None,
    *,
    server: AbstractContextManager[str] | None = None,
    model: str | None = None,
    api_key: str | None = None,
    requests: int = 64,
    inputs: str | None = None,
    outputs: str | None = None,
    shared_prefix: int = 0,
    max_concurrency: int | None = None,
    request_rate: float = math.inf,
    temperature: float = 0.0,
    goodput: Mapping[str, float] | None = None,
    warmups: int = 1,
    timeout_s: float = 600.0,
    seed: int = 0,
    plot: Path | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> int:
    """Send load to the server at `url`, or to the one that `server` starts. Print a table, append a row to `out`, and
    write a plot to the folder `plot`. Returns 1 if requests failed.

    Without `request_rate` the load is a closed loop of `max_concurrency` clients (default 8). With it, requests arrive
    as a Poisson process; `max_concurrency` then limits the requests in flight, and waiting for it is not counted, as in
    vLLM. Without `inputs` or `outputs`, prompts and outputs have 32 to 128 tokens, or fewer if the model's maximum
    length is too short. `goodput` has milliseconds by metric, e.g. {"ttft": 200, "tpot": 50}: the requests per second
    that meet all of them.
    """
    if (url is None) == (server is None):
        raise ArgumentError("the benchmark needs one server", hint="give its URL, or a MODEL to start one for")
    if max_concurrency is None and math.isinf(request_rate):
        max_concurrency = 8
    if (max_concurrency is not None and max_concurrency < 1) or warmups < 0 or not timeout_s > 0:
        raise ArgumentError(
            f"max_concurrency {max_concurrency}, warmups {warmups}, timeout {timeout_s} s",
            hint="use max_concurrency >= 1, warmups >= 0 and timeout > 0",
        )
    for name in goodput or {}:
        if name not in METRICS:
            raise UnknownName.among("goodput metric", name, METRICS)
    given = [None if text is None else Lengths.parse(text) for text in (inputs, outputs)]
    asked = {
        "num_prompts": requests,
        "shared_prefix": shared_prefix, "request_rate": request_rate if math.isfinite(request_rate) else "inf",
        "max_concurrency": max_concurrency, "temperature": temperature, "seed": seed,
    }  # fmt: skip
    rows = Rows(out, default=RESULTS / "serve", as_json=as_json)
    if plot is not None:
        ensure_folder(plot)
    when = arrivals(requests, request_rate, seed)
    with nullcontext(url) if server is None else server as address:
        at = Server(str(address), api_key)
        name, longest = described(at, model)
        lengths = fitting(*given, longest=longest, shared_prefix=shared_prefix)
        asked |= {"inputs": str(lengths[0]), "outputs": str(lengths[1])}
        ids = vocabulary(at, name, seed)
        both = [
            random_workload(count, *lengths, tokens=ids, shared_prefix=shared_prefix, seed=s)
            for count, s in ((requests, seed), (max(1, warmups), seed + 1))
        ]  # fmt: skip
        if warmups:
            measure(at, name, both[1], [0.0] * warmups, 1, temperature, timeout_s)
        before = at.cpu_seconds()
        answers, duration = measure(at, name, both[0], when, max_concurrency, temperature, timeout_s)
        after = at.cpu_seconds()
        result = summary(answers, duration, goodput or {})
        result["p50_engine_ttft_ms"] = at.engine_ttft_ms(result["completed"])
    used = None if before is None or after is None else after - before
    made = result["total_output_tokens"]
    result["server_cpu_us_per_token"] = 1e6 * used / made if used is not None and made else None
    row = {"system": "serve", "model_id": name, **asked, **result, "where": at.where}
    rows.add([row])
    why = None if plot is None else draw(answers, plot, f"{name}, {_load(row)}")
    rows.finish(*_summary(row, answers, why), single=True)
    return int(result["failed"] > 0)


def described(server: Server, model: str | None) -> tuple[str, int | None]:
    """The model name to use, by default the first, and its maximum length if the server reports it."""
    models = {str(entry["id"]): entry for entry in server.json("/v1/models")["data"]}
    name = model or next(iter(models))
    return name, models.get(name, {}).get("max_model_len")


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


def vocabulary(server: Server, model: str, seed: int) -> list[int]:
    """Token ids that the model has: those of random words, from the server's tokenizer."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_letters + string.digits, k=draw.randint(1, 8))) for _ in range(500)]
    ids = sorted(set(server.json("/tokenize", {"model": model, "prompt": " ".join(words)})["tokens"]))
    if not ids:
        raise BaguError(f"{server.url}/tokenize returned no token for 500 words")
    return ids


def measure(
    server: Server,
    model: str,
    workload: Workload,
    when: Sequence[float],
    max_concurrency: int | None,
    temperature: float,
    timeout_s: float,
) -> tuple[list[Answer], float]:
    """The answer to every request, and the seconds from the first request to the last answer."""
    bodies = [
        {"model": model, "prompt": list(prompt), "max_tokens": count, "temperature": temperature, "ignore_eos": True,
         "stream": True, "stream_options": {"include_usage": True}}
        for prompt, count in zip(workload.prompts, workload.max_tokens, strict=True)
    ]  # fmt: skip
    calls = [server.post("/v1/completions", body) for body in bodies]
    began = time.perf_counter()
    raw = asyncio.run(drive(server, calls, when, max_concurrency=max_concurrency, timeout_s=timeout_s))
    duration = time.perf_counter() - began
    return [answered(*one) for one in raw], duration


def _load(row: Mapping[str, Any]) -> str:
    if row["request_rate"] == "inf":
        return f"closed loop of {row['max_concurrency']}"
    most = "" if row["max_concurrency"] is None else f", at most {row['max_concurrency']} in flight"
    return f"Poisson, {row['request_rate']:g} requests/s{most}"


def _summary(row: Mapping[str, Any], answers: Sequence[Answer], no_plot: str | None) -> Iterator[RenderableType]:
    yield Text(
        f"{row['model_id']}, {_load(row)}: {row['completed']} of {row['num_prompts']} requests in "
        f"{row['duration']:.2f} s; {row['inputs']} tokens in, {row['outputs']} out"
    )
    yield (
        f"{row['request_throughput']:.2f} requests/s, {row['output_throughput']:,.0f} output tokens/s, "
        f"{row['total_token_throughput']:,.0f} tokens/s in and out"
    )
    if row["request_goodput"] is not None:
        yield f"goodput {row['request_goodput']:.2f} requests/s"
    if row["server_cpu_us_per_token"] is not None:
        yield f"server CPU {row['server_cpu_us_per_token']:.0f} µs per token; {row['where']}"
    if row["p50_engine_ttft_ms"] is not None and row["p50_ttft_ms"] is not None:
        over = row["p50_ttft_ms"] - row["p50_engine_ttft_ms"]
        yield f"TTFT p50 {row['p50_ttft_ms']:.2f} ms = engine {row['p50_engine_ttft_ms']:.2f} + HTTP {over:.2f}"
    kinds = ("mean", "p50", "p90", "p99")
    values = {name: [row[f"{kind}_{name}_ms"] for kind in kinds] for name in METRICS}
    yield table(
        "", ("ms", *kinds),
        [(f"{name.upper()} {words}", *("–" if v is None else f"{v:,.2f}" for v in values[name]))
         for name, words in METRICS.items()],
    )  # fmt: skip
    for error in row["errors"]:
        yield Text(f"failed: {sum(a.error == error for a in answers)} × {error}", style="red")
    if no_plot is not None:
        yield Text(f"no plot: {no_plot}", style="dim")
