"""`bagu bench serve`: send load to a server and measure the latencies of its clients.

    closed loop   `max_concurrency` clients, each sends its next request when the last one has finished
    Poisson       requests arrive at `request_rate` per second, independent of the server; the gaps are exponential
    trace         requests arrive as in a recorded workload (trace.py)

A sweep measures several closed loops or several rates, a comparison two servers in turn (serve_compare.py).

serve_latency.py defines the latencies; they are those of `vllm bench serve`, and so are the fields. Two more numbers
measure the cost of HTTP, if the server reports them:

    server_cpu_us_per_token   CPU time of the server process during the load / output tokens. It includes parsing,
                              tokenization and connections, but not the engine process (process_cpu_seconds_total in
                              /metrics)
    p50_engine_ttft_ms        from the arrival of a request in the engine process to the end of the step that sampled
                              its first token, median of this load (/engine); p50_ttft_ms minus this is the cost of HTTP
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from bagu.bench.harness import RESULTS, Rows
from bagu.bench.serve_client import Server
from bagu.bench.serve_compare import compare
from bagu.bench.serve_load import REQUESTS, Load, connect, fitting, run_load
from bagu.bench.serve_plot import draw, draw_sweep
from bagu.bench.serve_show import show_load, show_sweep
from bagu.bench.trace import read_trace
from bagu.bench.workload import Lengths
from bagu.errors import ArgumentError
from bagu.runs.record import ensure_folder

__all__ = ["fitting", "main", "sweep_loads"]


def main(
    url: str | None = None,
    *,
    server: AbstractContextManager[str] | None = None,
    model: str | None = None,
    api_key: str | None = None,
    requests: int | None = None,
    inputs: str | None = None,
    outputs: str | None = None,
    shared_prefix: int = 0,
    max_concurrency: int | None = None,
    request_rate: float = math.inf,
    trace: Path | None = None,
    trace_speed: float = 1.0,
    sweep: str | None = None,
    against: str | None = None,
    rounds: int = 5,
    temperature: float = 0.0,
    goodput: Mapping[str, float] | None = None,
    warmups: int = 1,
    timeout_s: float = 600.0,
    seed: int = 0,
    plot: Path | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> int:
    """Send load to the server at `url`, or to the one that `server` starts. Print a table, append rows to `out`, and
    write a plot to the folder `plot`. Returns 1 if requests failed.

    Without `request_rate` or `trace` the load is a closed loop of `max_concurrency` clients (default 8). With one,
    `max_concurrency` limits the requests in flight, and waiting for it is not counted, as in vLLM. Without `inputs` or
    `outputs`, prompts and outputs have 32 to 128 tokens, or fewer if the model's maximum length is too short. `goodput`
    has milliseconds by metric, e.g. {"ttft": 200, "tpot": 50}: the requests per second that meet all of them.
    `sweep` is "1,2,4" (clients) or "rate:1,2,4" (requests per second); `against` is the URL of a second server.
    """
    if (url is None) == (server is None):
        raise ArgumentError("the benchmark needs one server", hint="give its URL, or a MODEL to start one for")
    load = Load(
        requests=requests, inputs=_lengths(inputs), outputs=_lengths(outputs), shared_prefix=shared_prefix,
        max_concurrency=max_concurrency, request_rate=request_rate,
        trace=None if trace is None else read_trace(trace, requests), speed=trace_speed, temperature=temperature,
        goodput=goodput or {}, warmups=warmups, timeout_s=timeout_s, seed=seed,
    )  # fmt: skip
    loads = [load] if sweep is None else sweep_loads(load, sweep)
    if against is not None and sweep is not None:
        raise ArgumentError("a sweep of two servers", hint="give --sweep or --against, not both")
    other = None if against is None else Server(against, api_key)
    if other is not None and url is not None and Server(url).url == other.url:
        raise ArgumentError(
            f"{other.url} against itself", hint="its prefix cache would know the prompts: start a second server"
        )
    rows = Rows(out, default=RESULTS / "serve", as_json=as_json)
    if plot is not None:
        ensure_folder(plot)
    with nullcontext(url) if server is None else server as address:
        target = connect(Server(str(address), api_key), model, seed)
        if other is not None:
            return compare((target, connect(other, None, seed)), load, rows, rounds=rounds)
        measured = []
        for one in loads:
            row, answers = run_load(target, one)
            rows.add([row])
            measured.append((one, row, answers))
            if len(loads) > 1:
                rows.console.print(f"{one}: {row['output_throughput']:,.0f} output tokens/s", style="dim")
    if sweep is not None:
        points = [(str(_point(one)), row) for one, row, _ in measured]
        kind = "requests/s" if loads[0].is_poisson else "clients"
        why = None if plot is None else draw_sweep(points, kind, plot, f"{target.model}, {kind}: {sweep}")
        rows.finish(*show_sweep(points, kind, why))
    else:
        load, row, answers = measured[0]
        why = None if plot is None else draw(answers, plot, f"{target.model}, {load}")
        rows.finish(*show_load(load, row, answers, why), single=True)
    return int(any(row["failed"] > 0 for _, row, _ in measured))


def _lengths(text: str | None) -> Lengths | None:
    return None if text is None else Lengths.parse(text)


def _point(load: Load) -> str:
    return f"{load.request_rate:g}" if load.is_poisson else str(load.concurrency)


def sweep_loads(load: Load, text: str) -> Sequence[Load]:
    """The loads of a sweep: "1,2,4" are numbers of clients, "rate:0.5,1,2" requests per second. Each has prompts of its
    own, because a prefix cache would find those of the point before."""
    kind, _, values = text.rpartition(":")
    if kind not in ("", "rate", "concurrency") or not re.fullmatch(r"[\d.]+(,[\d.]+)*", values.replace(" ", "")):
        raise ArgumentError(f"the sweep {text!r}", hint="write 1,2,4,8 (clients) or rate:0.5,1,2 (requests per second)")
    given = values.replace(" ", "").split(",")
    if load.trace is not None or load.is_poisson or (kind != "rate" and load.max_concurrency is not None):
        raise ArgumentError(
            "a sweep sets the load of each point", hint="leave out --trace, --request-rate and --max-concurrency"
        )
    try:
        numbers = [float(v) if kind == "rate" else int(v) for v in given]
    except ValueError:
        raise ArgumentError(f"the sweep {text!r}", hint="numbers of clients are whole, rates are numbers") from None
    if len(set(numbers)) < len(numbers) or min(numbers) <= 0:
        raise ArgumentError(f"the sweep {text!r}", hint="give different numbers above 0")
    most, requests = max(numbers), load.requests or REQUESTS
    if kind != "rate" and most > requests:
        raise ArgumentError(
            f"{most} clients for {requests} requests",
            hint=f"give --requests {4 * int(most)} or more: 4 for each client",
        )
    return [
        replace(
            load, seed=load.seed + 2 * i, **({"request_rate": v} if kind == "rate" else {"max_concurrency": int(v)})
        )
        for i, v in enumerate(numbers)
    ]
