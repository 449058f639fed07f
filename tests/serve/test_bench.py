"""The benchmarks of serving: the workloads, the clocks, the client, and both commands on real engines and servers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_engine import small_engine, small_model
from tiny_server import KEY, Running, running_server

from bagu.bench import engine as bench_engine
from bagu.bench import serve as bench_serve
from bagu.bench.engine_peers import scripted
from bagu.bench.engine_timing import Case, measure_streams, measure_throughput
from bagu.bench.options import BenchSetting
from bagu.bench.serve_client import Answer, Server, answered, drive
from bagu.bench.serve_latency import samples, summary
from bagu.bench.serve_load import Load, fitting
from bagu.bench.serve_plot import draw
from bagu.bench.workload import Lengths, arrivals, random_workload
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.runs.record import read_rows
from bagu.serve.config import EngineConfig


def rows_of(folder: Path) -> list[dict]:
    (record,) = folder.glob("*.jsonl")
    return read_rows(record)


# --- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab_size", [151_936, 97])
def test_the_default_workload_is_nano_vllms(vocab_size: int) -> None:
    """142,827 tokens in and 133,966 out are what nano-vllm's bench.py draws with its seed 0."""
    work = random_workload(256, Lengths(100, 1024), Lengths(100, 1024), tokens=vocab_size)
    assert (work.input_tokens, work.output_tokens) == (142_827, 133_966)
    assert max(max(p) for p in work.prompts) < vocab_size


def test_a_shared_prefix_comes_before_the_same_prompts() -> None:
    plain, shared = (
        random_workload(4, Lengths(3, 9), Lengths(1, 5), tokens=[5, 7, 11], shared_prefix=n) for n in (0, 6)
    )
    assert len({p[:6] for p in shared.prompts}) == 1
    assert [p[6:] for p in shared.prompts] == list(plain.prompts)
    assert set().union(*shared.prompts) <= {5, 7, 11}


@pytest.mark.parametrize("text", ["", "a", "0", "9-3", "1-2-3", "-4"])
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        Lengths.parse(text)


def test_arrivals_are_poisson() -> None:
    """The gaps of a Poisson process have a standard deviation equal to their mean."""
    times = arrivals(4000, 50.0, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.08)
    assert arrivals(3, math.inf) == [0.0, 0.0, 0.0]
    with pytest.raises(ArgumentError):
        arrivals(3, 0.0)


# --- the engine -------------------------------------------------------------------------------------------------------


def test_throughput_counts_every_token_and_the_warm_up_does_not_count() -> None:
    engine = small_engine(small_model())
    work, warmup = (random_workload(6, Lengths(3, 9), Lengths(2, 7), tokens=97, seed=s) for s in (0, 1))
    found = measure_throughput(engine, [warmup, work])[-1]
    assert found.output_tokens == work.output_tokens
    assert engine.stats().generated_tokens == work.output_tokens + warmup.output_tokens
    assert found.facts["prefix_queries"] <= work.input_tokens
    assert 0 < found.facts["overhead_s"] < found.facts["step_s"] < found.seconds
    assert engine.blocks.used_count == 0


def test_shared_prefixes_are_hit() -> None:
    engine = small_engine(small_model(), max_num_batched_tokens=27)  # the first step has room for one request
    work = random_workload(4, Lengths(3, 3), Lengths(1, 1), tokens=97, shared_prefix=24)
    first = random_workload(1, Lengths(3, 3), Lengths(1, 1), tokens=97, seed=9)
    found = measure_throughput(engine, [first, work])[-1]
    assert found.facts["prefix_hits"] == 3 * 24  # all but the first find the six blocks


def test_streams_time_the_decode_alone() -> None:
    """The prompts of two streams take several steps; what they and the first tokens took is not in the rate."""
    engine = small_engine(small_model(), max_num_batched_tokens=16)
    case = Case(streams=(1, 2), prompt=20, new=8, repeats=1)
    (one, alone), (two, both) = measure_streams(engine, case)
    assert (one, two) == (1, 2)
    assert alone.output_tokens == alone.facts["steps"] == 8
    assert both.output_tokens <= 16 and both.facts["prefix_hits"] == 0


def test_bench_engine_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text('print("noise"); print(\'{"what": "peer, 2 streams", "tokens_per_s": 10}\')\n')
    model = small_model()
    code = bench_engine.main(
        Case(streams=(2,), prompt=4, new=4, repeats=1), EngineConfig(max_num_seqs=4),
        BenchSetting(device="cpu", out=tmp_path / "out"), load=lambda: (model, None, None), name="small",
        peers=[str(peer)], rounds=2,
    )  # fmt: skip
    rows = rows_of(tmp_path / "out")
    assert code == 0 and [r["implementation"] for r in rows] == ["bagu", "peer.py"] * 2
    assert all(r["system"] == "engine" and r["model"] == "small" and r["streams"] == 2 and r["env"] for r in rows)
    assert rows[0]["output_tokens"] == 8 and rows[0]["steps"] == 4 and rows[0]["prompt_tokens_per_s"] > 0
    assert "small" in capsys.readouterr().out


def test_bench_engine_times_adapters_against_the_base(tmp_path: Path) -> None:
    model = small_model()
    bench_engine.main(
        Case(streams=(3,), prompt=4, new=4, repeats=1, adapters=2), EngineConfig(max_num_seqs=4, max_adapter_rank=2),
        BenchSetting(device="cpu", out=tmp_path), load=lambda: (model, None, None),
    )  # fmt: skip
    ours, base = rows_of(tmp_path)
    assert (ours["implementation"], base["implementation"]) == ("bagu", "bagu without adapters")
    assert ours["case"]["adapters"] == 2 and ours["output_tokens"] == base["output_tokens"] == 12
    with pytest.raises(ArgumentError, match="--adapters without --streams"):
        Case(adapters=2)


def test_bench_engine_runs_a_workload_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    model = small_model()
    bench_engine.main(
        Case(requests=5, inputs=Lengths(3, 6), outputs=Lengths(2, 4)), EngineConfig(max_num_seqs=2),
        BenchSetting(device="cpu", out=tmp_path, as_json=True), load=lambda: (model, None, None), peers=["generate"],
    )  # fmt: skip
    bagu, peer = json.loads(capsys.readouterr().out)
    assert (bagu["implementation"], peer["implementation"]) == ("bagu", "generate")
    assert bagu["output_tokens"] == peer["output_tokens"] and bagu["input_tokens"] == peer["input_tokens"]


def test_bench_engine_times_prompts_beside_the_eager_forward(tmp_path: Path) -> None:
    model = small_model()
    bench_engine.main(
        Case(streams=(1,), prompt=12, new=2, repeats=1), EngineConfig(max_num_seqs=2),
        BenchSetting(device="cpu", out=tmp_path), name="small", load=lambda: (model, None, None), peers=["eager"],
        rounds=2,
    )  # fmt: skip
    rows = rows_of(tmp_path)
    assert [r["implementation"] for r in rows] == ["bagu", "eager"] * 2, "they take turns"
    assert all(r["prompt_tokens_per_s"] > 0 for r in rows)
    assert rows[1]["prompt_tokens_per_s"] == pytest.approx(12 * rows[1]["tokens_per_s"])
    with pytest.raises(ArgumentError, match="eager measures one prompt"):
        bench_engine.main(Case(streams=(4,)), EngineConfig(), BenchSetting(device="cpu", out=tmp_path), peers=["eager"])


def test_bench_engine_says_what_is_wrong(tmp_path: Path) -> None:
    run = partial(bench_engine.main, setting=BenchSetting(device="cpu", out=tmp_path))
    with pytest.raises(UnknownName, match="shape"):
        run(Case(), EngineConfig(), shape="cpu_9m")
    with pytest.raises(UnknownName, match="peer"):
        run(Case(), EngineConfig(), peers=["generat"])
    with pytest.raises(ArgumentError, match="streams"):
        run(Case(streams=(1,)), EngineConfig(), peers=["generate"])
    with pytest.raises(ArgumentError, match="one stream on a CPU"):
        run(Case(), EngineConfig(), peers=["llama.cpp"])
    with pytest.raises(ArgumentError, match="--speculative"):
        run(Case(), EngineConfig(speculative="ngram"))
    for wrong in ({"requests": 0}, {"streams": (0,)}, {"new": 0}):
        with pytest.raises(ArgumentError, match="0"):
            Case(**wrong)
    broken = tmp_path / "broken.py"
    broken.write_text('print(\'{"tokens_per_s": 1}\'); raise SystemExit("out of luck")\n')
    with pytest.raises(BaguError, match="out of luck"):
        scripted(broken)


# --- latencies --------------------------------------------------------------------------------------------------------


def test_latencies_are_what_their_formulas_say() -> None:
    answers = [
        Answer(asked=10.0, times=(10.1, 10.2, 10.5), input_tokens=4, output_tokens=5),
        Answer(asked=10.0, times=(10.4,), input_tokens=2, output_tokens=1),
        Answer(asked=10.0, times=(10.3,), error="is incomplete"),
    ]
    found = samples(answers)
    assert found["ttft"] == pytest.approx([0.1, 0.4])
    assert found["e2el"] == pytest.approx([0.5, 0.4])
    assert found["tpot"] == pytest.approx([0.4 / 4])
    assert found["itl"] == pytest.approx([0.1, 0.3])
    row = summary(answers, 2.0, {"ttft": 200.0, "tpot": 120.0})
    assert (row["completed"], row["failed"], row["errors"]) == (2, 1, ["is incomplete"])
    assert row["request_throughput"] == 1.0 and row["output_throughput"] == 3.0 and row["total_token_throughput"] == 6.0
    assert row["request_goodput"] == 0.5  # the second's first token is late
    assert row["max_concurrent_requests"] == 2
    assert row["median_ttft_ms"] == row["p50_ttft_ms"] == pytest.approx(250.0)
    assert row["p99_itl_ms"] == pytest.approx(298.0)


def test_a_load_without_an_answer_has_no_latencies(tmp_path: Path) -> None:
    row = summary([Answer(asked=0.0, error="refused")], 1.0, {})
    assert row["mean_ttft_ms"] is None and row["request_throughput"] == 0.0
    assert draw([Answer(asked=0.0, error="refused")], tmp_path, "none") == "no request was answered"


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"text":"","finish_reason":null}]}\n\n',
    b'data: {"choices":[{"text":"b","finish_reason":"length"}]}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\ndata: [DONE]\n\n',
]
STREAM = HEAD + b"".join(b"%x\r\n%s\r\n" % (len(e), e) for e in EVENTS) + b"0\r\n\r\n"


@given(st.sets(st.integers(1, len(STREAM) - 1)))
def test_a_stream_is_read_the_same_however_it_is_cut(cuts: set[int]) -> None:
    """An event has the time of the piece in which its last byte is."""
    places = [0, *sorted(cuts), len(STREAM)]
    received = [(float(b), STREAM[a:b]) for a, b in itertools.pairwise(places)]
    found = answered(0.0, received)
    assert (found.error, found.input_tokens, found.output_tokens) == (None, 3, 2)
    ends = [STREAM.index(EVENTS[i]) + len(EVENTS[i]) for i in (0, 2)]
    assert found.times == tuple(float(next(p for p in places if p >= end)) for end in ends)


@pytest.mark.parametrize("length", [0, 9, len(HEAD), len(HEAD) + 30, len(STREAM) - 20])
def test_a_stream_that_breaks_off_is_an_error(length: int) -> None:
    found = answered(0.0, [(1.0, STREAM[:length])] if length else [])
    assert found.error is not None


def test_an_error_in_the_stream_is_an_error() -> None:
    event = b'data: {"error":{"message":"the engine died"}}\n\n'
    found = answered(0.0, [(1.0, b"HTTP/1.1 200 OK\r\n\r\n" + event)])
    assert found.error is not None and "the engine died" in found.error


# --- a server ---------------------------------------------------------------------------------------------------------


def test_closed_loop(tiny: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    code = bench_serve.main(
        nullcontext(tiny.url),
        Load(requests=10, inputs=Lengths(4, 8), outputs=Lengths(3, 6), max_concurrency=3, goodput={"ttft": 60_000}),
        api_key=KEY, plot=tmp_path / "plots", out=tmp_path,
    )  # fmt: skip
    (row,) = rows_of(tmp_path)
    assert code == 0 and (row["completed"], row["failed"]) == (10, 0)
    assert 1 <= row["max_concurrent_requests"] <= 3
    work = random_workload(10, Lengths(4, 8), Lengths(3, 6), tokens=97)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (work.input_tokens, work.output_tokens)
    assert 0 < row["p50_ttft_ms"] <= row["p99_ttft_ms"] <= row["p99_e2el_ms"] <= 1e3 * row["duration"]
    assert row["request_goodput"] == row["request_throughput"]
    assert row["server_cpu_us_per_token"] > 0 and 0 < row["p50_engine_ttft_ms"] < row["p50_ttft_ms"]
    assert {p.name for p in (tmp_path / "plots").iterdir()} == {"serve.svg", "serve.png"}
    assert "closed loop of 3" in capsys.readouterr().out


def test_poisson_arrivals(tiny: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = Load(requests=6, inputs=Lengths(4, 4), outputs=Lengths(3, 3), request_rate=40.0)
    code = bench_serve.main(nullcontext(tiny.url), load, api_key=KEY, out=tmp_path, as_json=True)
    row = json.loads(capsys.readouterr().out)
    assert code == 0 and row["completed"] == 6 and row["request_rate"] == 40.0
    assert row["duration"] >= arrivals(6, 40.0)[-1]


@pytest.mark.parametrize(
    ("given", "longest", "expected"),
    [
        ((None, None), 4096, ("32-128", "32-128")), ((None, None), None, ("32-128", "32-128")),
        ((None, None), 100, ("32-50", "32-50")), ((None, None), 33, ("16", "17")),
        (("90", None), 100, ("90", "10")), ((None, "3-60"), 100, ("32-40", "3-60")),
        (("200", "300"), 100, ("200", "300")),
    ],
)  # fmt: skip
def test_default_lengths_fit_the_model(
    given: tuple[str | None, str | None], longest: int | None, expected: tuple[str, str]
) -> None:
    asked = [None if text is None else Lengths.parse(text) for text in given]
    assert tuple(map(str, fitting(*asked, longest=longest, shared_prefix=0))) == expected


def test_default_lengths_need_room_for_a_token() -> None:
    with pytest.raises(ArgumentError, match="leave 0 tokens"):
        fitting(None, None, longest=64, shared_prefix=63)


@pytest.mark.slow
def test_a_server_of_a_short_model_is_loaded_with_what_it_takes(tmp_path: Path) -> None:
    with running_server(tmp_path / "stderr", "--max-model-len", "40") as short:
        assert bench_serve.main(nullcontext(short.url), Load(requests=3), out=tmp_path) == 0
    (row,) = rows_of(tmp_path)
    assert (row["inputs"], row["outputs"], row["completed"]) == ("20", "20", 3)


def test_failures_are_counted_and_told(tiny: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = Load(requests=2, inputs=Lengths(4, 4), outputs=Lengths(5000, 5000), warmups=0)
    code = bench_serve.main(nullcontext(tiny.url), load, api_key=KEY, out=tmp_path)
    (row,) = rows_of(tmp_path)
    assert code == 1 and (row["completed"], row["failed"]) == (0, 2)
    assert "status 400" in row["errors"][0] and "status 400" in capsys.readouterr().out
    with pytest.raises(BaguError, match="401"):
        bench_serve.main(nullcontext(tiny.url), Load(), api_key="wrong", out=tmp_path)


def test_a_server_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match="cannot be reached"):
        bench_serve.main(nullcontext("http://127.0.0.1:9"), Load(), out=tmp_path)
    with pytest.raises(ArgumentError, match="not the URL"):
        bench_serve.main(nullcontext("127.0.0.1"), Load(), out=tmp_path)
    with pytest.raises(UnknownName, match="goodput"):
        Load(goodput={"tttf": 1})


def test_a_request_that_takes_too_long_is_given_up() -> None:
    """The server here takes connections and says nothing."""

    async def load() -> Answer:
        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        listener = await asyncio.start_server(silent, "127.0.0.1", 0)
        async with listener:
            server = Server(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
            calls = [server.post("/v1/completions", {})]
            (found,) = await drive(server, calls, [0.0], max_concurrency=None, timeout_s=0.05)
            return answered(*found)

    error = asyncio.run(load()).error
    assert error is not None and "TimeoutError" in error
