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

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from bagu.bench.harness import RESULTS, Rows
from bagu.bench.serve_client import Server
from bagu.bench.serve_compare import compare
from bagu.bench.serve_load import REQUESTS, Load, Target, connect, run_load
from bagu.bench.serve_plot import draw, draw_sweep
from bagu.bench.serve_show import show_load, show_sweep
from bagu.errors import ArgumentError
from bagu.runs.record import ensure_folder


def main(
    server: AbstractContextManager[str],
    load: Load,
    *,
    model: str | None = None,
    api_key: str | None = None,
    sweep: str | None = None,
    against: str | None = None,
    rounds: int = 5,
    plot: Path | None = None,
    out: Path | None = None,
    as_json: bool = False,
) -> int:
    """Send the load to a server. Print a table, append rows to `out`, and write a plot to the folder `plot`. Returns 1
    if requests failed.

    `server` gives the URL and may start the server; `nullcontext(url)` is one that runs already. `sweep` is "1,2,4"
    (clients) or "rate:1,2,4" (requests per second). `against` is the URL of a second server: both are measured
    `rounds` times in turn.
    """
    if against is not None and (sweep is not None or plot is not None):
        raise ArgumentError("a comparison of two servers has no sweep and no plot", hint="leave out --sweep and --plot")
    loads = [load] if sweep is None else sweep_loads(load, sweep)
    other = None if against is None else Server(against, api_key)  # a wrong URL is refused before a server is started
    rows = Rows(out, default=RESULTS / "serve", as_json=as_json)
    if plot is not None:
        ensure_folder(plot)
    with server as url:
        target = connect(Server(url, api_key), model, load.seed)
        if other is not None:
            return compare((target, _second(target, other, load.seed)), load, rows, rounds=rounds)
        measured = []
        for one in loads:
            row, answers = run_load(target, one)
            rows.add([row])
            measured.append((one, row, answers))
            if len(loads) > 1:
                rows.console.print(f"{one}: {row['output_throughput']:,.0f} output tokens/s", style="dim")
    if sweep is not None:
        points = [(_point(one), row) for one, row, _ in measured]
        kind = "requests/s" if loads[0].is_poisson else "clients"
        why = None if plot is None else draw_sweep(points, kind, plot, f"{target.model}, {kind}: {sweep}")
        rows.finish(*show_sweep(points, kind, why))
    else:
        load, row, answers = measured[0]
        why = None if plot is None else draw(answers, plot, f"{target.model}, {load}")
        rows.finish(*show_load(load, row, answers, why), single=True)
    return int(any(row["failed"] > 0 for _, row, _ in measured))


def _second(first: Target, server: Server, seed: int) -> Target:
    """The server that `first` is compared with."""
    if server.url == first.server.url:
        raise ArgumentError(
            f"{server.url} against itself", hint="its prefix cache would know the prompts: start a second server"
        )
    return connect(server, None, seed)


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
