"""`bagu bench serve` beyond one load: traces, goodput limits, sweeps, and the comparison of two servers."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bagu.bench import serve
from bagu.bench.serve_client import answered
from bagu.bench.serve_compare import ratio
from bagu.bench.serve_latency import outliers, parse_goodput
from bagu.bench.serve_load import Load
from bagu.bench.trace import read_trace, trace_workload
from bagu.bench.units import parse_ms
from bagu.bench.workload import Lengths
from bagu.errors import ArgumentError, BaguError
from bagu.runs.record import read_rows

# --- traces -----------------------------------------------------------------------------------------------------------

MOONCAKE = """{"timestamp": 500, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]}
{"timestamp": 1500, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 9]}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:05.4799600,396,109
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,100,0,100,Conversation log
118,GPT-4,1087,230,1317,API log
"""


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (MOONCAKE, [(0.0, 1030, 5), (1.0, 1100, 2)]),
        (AZURE, [(0.0, 374, 44), (1.5, 396, 109)]),
        (BURST, [(0.0, 472, 18), (113.0, 1087, 230)]),
        ("time_s,input_tokens,output_tokens\n2.5,3,4\n", [(0.0, 3, 4)]),
    ],
)
def test_public_trace_formats_are_read(tmp_path: Path, text: str, requests: list[tuple[float, int, int]]) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    trace = read_trace(path)
    found = [(r.arrival, r.input_tokens, r.output_tokens) for r in trace.requests]
    assert found == [pytest.approx(r) for r in requests]
    assert trace.left_out == (("1 that read or generate no token",) if text is BURST else ())
    assert len(read_trace(path, 1).requests) == 1


def test_requests_with_common_blocks_have_a_common_prefix(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    work = trace_workload(read_trace(path), tokens=range(1000), seed=0)
    a, b = work.prompts
    assert (len(a), len(b)) == (1030, 1100) and a[:1024] == b[:1024] and a[1024:] != b[1024:1030]


def test_requests_that_do_not_fit_the_model_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    trace = read_trace(path).fitting(420)
    assert len(trace.requests) == 1 and "1 longer than the model's maximum length of 420" in trace.left_out[0]
    assert trace.arrivals(2.0) == [0.0]
    with pytest.raises(ArgumentError, match="no request can be sent"):
        read_trace(path).fitting(10)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no request"),
        ("a,b\n1,2\n", "has the columns a, b"),
        ("{broken\n", ":1: not JSON"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,2\n", ":2: cannot read TIMESTAMP"),
        ("time_s,input_tokens,output_tokens\n3,1,2\n2,1,2\n", ":3: the request arrives before"),
        ("time_s,input_tokens,output_tokens\n3,-1,2\n", ":2: time_s 3, input_tokens -1"),
        ("time_s,input_tokens,output_tokens\nnan,1,2\n", ":2: time_s nan"),
        ("time_s,input_tokens,output_tokens\n3,1\n", ":2: cannot read"),
        ("time_s,input_tokens,output_tokens\n3,0,2\n", "no request that reads"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ArgumentError) as caught:
        read_trace(path)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"cannot read the trace .*nothing"):
        read_trace(tmp_path / "nothing")


# --- limits, outliers, loads ------------------------------------------------------------------------------------------


def test_goodput_limits_are_parsed() -> None:
    assert parse_goodput(["ttft:300ms tpot:0.03s", "e2el:5s,itl:40"]) == {
        "ttft": 300.0, "tpot": 30.0, "e2el": 5000.0, "itl": 40.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    "text", ["ttft", "tttf:3", "ttft:-3", "ttft:", "ttft:3m", "ttft:1,ttft:2", "ttft:0", "ttft:nan"]
)
def test_bad_goodput_limits_are_refused(text: str) -> None:
    with pytest.raises(BaguError):
        parse_goodput([text])


def test_outliers_are_counted_and_the_mean_without_them_is_given() -> None:
    seconds = [0.010, 0.011, 0.012, 0.013, 0.010, 0.011, 0.012, 0.500]
    far = outliers(seconds)
    assert far is not None and far.count == 1 and far.mean_without_ms == pytest.approx(11.2857, rel=1e-4)
    assert 13 < far.above_ms < 500
    assert outliers([0.01] * 8) is not None and outliers([0.01] * 8).count == 0  # type: ignore[union-attr]
    assert outliers(seconds[:7]) is None


@pytest.mark.parametrize("sweep", ["", "a", "1,,2", "1.5,2", "0,1", "2,2", "rates:1", "1;2", "100,200"])
def test_a_bad_sweep_is_refused(sweep: str) -> None:
    with pytest.raises(ArgumentError):
        serve.sweep_loads(Load(), sweep)


def test_each_point_of_a_sweep_has_its_own_prompts() -> None:
    clients, rates = serve.sweep_loads(Load(seed=5), "1, 2,4"), serve.sweep_loads(Load(), "rate:0.5,2")
    assert [(one.concurrency, one.seed) for one in clients] == [(1, 5), (2, 7), (4, 9)]
    assert [one.request_rate for one in rates] == [0.5, 2.0] and rates[0].concurrency is None


def test_settings_that_exclude_each_other_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(AZURE)
    trace = read_trace(path)
    with pytest.raises(ArgumentError, match="a trace sets"):
        Load(trace=trace, request_rate=2.0)
    with pytest.raises(ArgumentError, match="only a trace has a speed"):
        Load(speed=2.0)
    with pytest.raises(ArgumentError, match="speed"):
        Load(trace=trace, speed=0.0)
    with pytest.raises(ArgumentError, match="sets the load"):
        serve.sweep_loads(Load(trace=trace), "1,2")
    with pytest.raises(ArgumentError, match="not a time limit"):
        parse_ms("soon")


def test_the_ratio_of_rounds_has_an_interval() -> None:
    mean, low, high = ratio([100.0, 200.0, 50.0, 80.0], [210.0, 390.0, 101.0, 161.0])
    assert low < mean < high and mean == pytest.approx(2.0, rel=0.03) and low > 1.8
    assert ratio([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == (1.0, 1.0, 1.0)
    assert ratio([1.0, 2.0], [2.0, 4.0])[0] == pytest.approx(2.0) and math.isnan(ratio([1.0, 2.0], [2.0, 4.0])[1])


def test_a_stream_without_token_counts_is_an_error() -> None:
    event = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
    found = answered(0.0, [(1.0, b"HTTP/1.1 200 OK\r\n\r\n" + event)])
    assert found.error is not None and "no token counts" in found.error


# --- servers of another make ------------------------------------------------------------------------------------------


class Other(BaseHTTPRequestHandler):
    """A server with the OpenAI API and without /tokenize, /metrics and /engine, as other makes have it."""

    def do_GET(self) -> None:
        models = {"data": [{"id": "other", "max_model_len": 300}]}
        self._send(200 if self.path == "/v1/models" else 404, "application/json", json.dumps(models).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/completions":
            return self._send(404, "application/json", b"{}")
        self.server.bodies.append(body)  # type: ignore[attr-defined]
        n = body["max_tokens"]
        chunks: list[Any] = [{"choices": [{"text": "a", "finish_reason": None}]}] * (n - 1)
        chunks += [{"choices": [{"text": "a", "finish_reason": "length"}]}]
        chunks += [{"choices": [], "usage": {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": n}}]
        text = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
        return self._send(200, "text/event-stream", text.encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def other_server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Other)
    server.bodies = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.bodies  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (record,) = folder.glob("*.jsonl")
    return read_rows(record)


def test_two_servers_get_the_same_prompts_in_alternating_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with other_server() as (a, to_a), other_server() as (b, to_b):
        load = Load(
            requests=4, inputs=Lengths(3, 6), outputs=Lengths(2, 4), max_concurrency=1, goodput={"ttft": 60_000.0}
        )
        status = serve.main(nullcontext(a), load, against=b, rounds=3, out=tmp_path)
        with pytest.raises(ArgumentError, match="against itself"):
            serve.main(nullcontext(a), Load(), against=f"{a}/v1", out=tmp_path)
        with pytest.raises(ArgumentError, match="2 rounds or more"):
            serve.main(nullcontext(a), Load(), against=b, rounds=1, out=tmp_path)
        with pytest.raises(ArgumentError, match="no sweep and no plot"):
            serve.main(nullcontext(a), Load(), against=b, plot=tmp_path / "plot", out=tmp_path)
    assert status == 0 and len(to_a) == 1 + 3 * 4  # one warm-up request
    prompts = [[body["prompt"] for body in bodies] for bodies in (to_a, to_b)]
    assert prompts[0] == prompts[1] and all(isinstance(p, str) for p in prompts[0])
    assert len(set(prompts[0])) == len(prompts[0])  # no round repeats a prompt
    rows = rows_of(tmp_path)
    assert [(row["round"], row["server"]) for row in rows] == [
        (0, "A"),
        (0, "B"),
        (1, "B"),
        (1, "A"),
        (2, "A"),
        (2, "B"),
    ]
    assert all(row["system"] == "serve_compare" and row["request_goodput"] > 0 for row in rows)
    said = capsys.readouterr().out
    assert "B / A" in said and "95 % interval" in said and "as text" in said and "1 warm-up" in said


def test_a_sweep_has_a_row_for_each_point_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    with other_server() as (url, _):
        load = Load(requests=6, goodput={"tpot": 60_000.0})
        status = serve.main(nullcontext(url), load, sweep="1,3", plot=tmp_path / "plot", out=tmp_path)
    rows = rows_of(tmp_path)
    assert status == 0 and [row["max_concurrency"] for row in rows] == [1, 3]
    assert all(row["completed"] == 6 and row["inputs"] == "32-128" for row in rows)
    assert {p.name for p in (tmp_path / "plot").iterdir()} == {"sweep.svg", "sweep.png"}
    said = capsys.readouterr().out
    assert "clients" in said and "TPOT 60000 ms for at least 90%" in said and "up to 3 clients" in said


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time_s,input_tokens,output_tokens\n0,30,4\n0.5,299,9\n1,20,3\n1,7,0\n2,10,2\n")
    with other_server() as (url, bodies):
        status = serve.main(
            nullcontext(url), Load(trace=read_trace(path), speed=100.0, warmups=2), out=tmp_path / "out"
        )
    (row,) = rows_of(tmp_path / "out")
    assert status == 0 and row["completed"] == row["num_prompts"] == 3
    sent = sorted((len(body["prompt"].split()), body["max_tokens"]) for body in bodies[2:])
    assert sent == [(10, 2), (20, 3), (30, 4)]
    assert row["left_out"] == [
        "1 that read or generate no token",
        "1 longer than the model's maximum length of 300 tokens",
    ]
    assert math.isfinite(row["p99_send_lag_ms"])
    said = " ".join(capsys.readouterr().out.split())
    assert "warm-up: 2 requests before the load, not counted" in said and "1 that read or generate no token" in said
    assert "trace trace.csv, 100 times as fast" in said and "sent late by the client" in said
