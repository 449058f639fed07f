"""`bagu tune serve` as a command: what it measures, prints and writes. The server here is a small one in a thread.

The search follows the measured times, so the tests do not depend on which points it measures.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_bench_serve import other_server

from bagu.bench.options import TuneServe
from bagu.bench.tune import serve
from bagu.bench.tune.roofline import Roofline
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError, BaguError
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.models import save_model
from bagu.runs.record import read_rows

ROOFLINE = Roofline(parameters=10**7, kv_bytes=1024, itemsize=4, bandwidth=1e10, rate=1e11, threads=2)
SPACE = [
    "max_num_seqs=2,4,8,16",
    "max_num_batched_tokens=default",
    "block_size=default,32",
    "threads=1",
    "speculative=none",
]


def run(out: Path, start: serve.Start, **settings: object) -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200)
    options = {
        "ttft": 60_000.0,
        "tpot": 60_000.0,
        "values": tuple(SPACE),
        "requests": 8,
        "max_concurrency": 2,
        "share": 1.0,
    }
    given = TuneServe(model="folder/model", out=out, **{**options, **settings})  # type: ignore[arg-type]
    status = serve.main(given, start=start, roofline=ROOFLINE, longest=300, console=console)
    return status, console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_winner_is_written_and_the_same_command_resumes(tmp_path: Path) -> None:
    started: list[str] = []

    @contextmanager
    def start(model: str, *options: str) -> Iterator[str]:
        assert (model, options[0]) == ("folder/model", "--config")
        started.append(Path(options[1]).read_text())
        if "int8" in started[-1]:
            raise BaguError("this machine has no int8")
        with other_server() as (url, _):
            yield url

    status, said = run(tmp_path, start)
    rows = read_rows(tmp_path / "trials.jsonl")
    assert status == 0 and len(rows) == len(started)
    assert (
        rows[0]["point"]["max_num_seqs"] == 16 and rows[0]["point"]["quantization"] is None
    )  # nearest to the defaults
    assert "max_num_seqs = 16\nthreads = 1\n" in started[0]
    failed = [row for row in rows if row["error"]]
    assert all(row["point"]["quantization"] == "int8" and row["samples"] is None for row in failed)
    config = (tmp_path / "serve.toml").read_text()
    assert "int8" not in config and "max_num_seqs = " in config and "TTFT 60000 ms" in config
    assert "roofline" in said and "measured" in said and "(baseline)" in said
    before = list(started)
    again, resumed = run(tmp_path, start)
    assert again == 0 and started == before  # nothing is measured twice
    assert f"{len(rows)} measurements are from the record" in resumed
    run(tmp_path, start, ttft=50_000.0)
    assert len(started) > len(before)  # other limits are another search


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ttft": None, "tpot": None}, "no limit to tune for"),
        ({"share": 0.0}, "a budget of 0.0"),
        ({"values": ["batch=1"]}, "no setting to tune 'batch'"),
        ({"requests": 0}, "requests is 0"),
        ({"request_rate": -1.0}, "a request rate of -1.0"),
    ],
)
def test_bad_input_is_refused_before_a_server_starts(tmp_path: Path, settings: dict[str, object], says: str) -> None:
    def start(*_: object) -> None:
        raise AssertionError("no server may start")

    with pytest.raises((ArgumentError, BaguError)) as caught:
        run(tmp_path, start, **settings)  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_limits_that_nothing_meets_are_reported(tmp_path: Path) -> None:
    @contextmanager
    def start(model: str, *options: str) -> Iterator[str]:
        with other_server() as (url, _):
            yield url

    status, said = run(tmp_path, start, ttft=1e-6, values=[*SPACE, "quantization=none"])
    assert status == 1 and "no request of the winner met the limits" in said


# SIGTERM arrives while Popen starts the server: the moment at which nothing refers to it yet
TUNE = """
import os, signal, subprocess, sys
class Popen(subprocess.Popen):
    def __init__(self, command, **more):
        super().__init__(command, **more)
        if "serve" in command:
            print(self.pid, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen = Popen
from bagu.cli import main
main(["tune", "serve", sys.argv[1], "--ttft", "1s", "--out", sys.argv[2], *sys.argv[3:]])
"""


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_sigterm_while_a_server_starts_ends_the_server_too(tmp_path: Path) -> None:
    tokenizer = BpeTokenizer.train(["hello world "] * 4, vocab_size=262)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=48, max_len=300,
    )  # fmt: skip
    save_model(init_weights(Transformer(config, dtype=torch.float32), 0), tokenizer, tmp_path / "model")
    command = [sys.executable, "-c", TUNE, str(tmp_path / "model"), str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    server = next(int(line) for line in ended.stdout.splitlines() if line.isdecimal())
    assert ended.returncode == 128 + 15, ended.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
