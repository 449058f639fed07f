"""Engines with tensor parallelism that cannot start, and ranks that die. The process has no engine before each test."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from small_engine import small_engine, small_model

from bagu.errors import ArgumentError
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.serve.tp.group import RankLost, Ranks


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGU_START_TIMEOUT", "180")  # a loaded machine imports torch slowly


@pytest.mark.usefixtures("forked")
def test_a_killed_rank_is_named_and_nothing_is_left() -> None:
    engine = small_engine(small_model(), tp=2, threads=1)
    engine.check_ranks()
    assert engine.ranks is not None
    (process,) = engine.ranks.processes.values()
    process.kill()
    with pytest.raises(RankLost, match="rank 1 of tp = 2 was killed by SIGKILL"):
        engine.generate([[1, 2, 3]], Sampling(max_tokens=100, ignore_eos=True))
    with pytest.raises(RankLost, match="killed by SIGKILL"):
        engine.check_ranks()  # what an idle engine process does every second
    engine.close()
    assert process.returncode == -signal.SIGKILL and not torch.distributed.is_initialized()


@pytest.mark.usefixtures("forked")
def test_an_error_of_another_rank_is_the_reason() -> None:
    """Rank 1 gets a plan that it cannot run, which rank 0 does not run."""
    engine = small_engine(small_model(), tp=2, threads=1)
    try:
        assert engine.ranks is not None
        engine.ranks.send("not a message that a rank knows")
        with pytest.raises(RankLost, match="rank 1 of tp = 2 failed: ArgumentError: a rank got"):
            engine.generate([[1, 2, 3]], Sampling(max_tokens=100, ignore_eos=True))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"tp": 0}, "tp = 0"),
        ({"tp": 2, "invariant": True}, "tp = 2 cannot be combined with invariant"),
        ({"tp": 2, "quantization": "int8"}, "tp = 2 cannot be combined with quantization = int8"),
    ],
)
def test_options_that_do_not_go_with_tp_are_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        EngineConfig(**config)


def test_heads_that_tp_does_not_divide_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ArgumentError, match="tp=2 does not divide 1 KV heads"):
        Engine(small_model("mqa, QK norm"), None, EngineConfig(tp=2))
    assert not torch.distributed.is_initialized()


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ArgumentError, match="tp = 1000 on a machine with"):
        Ranks(1000, torch.device("cuda"))


def children(pid: int) -> list[int]:
    found = [(task / "children").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    return [int(child) for each in found for child in each]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads the children of a process from /proc")
def test_the_server_answers_as_one_process_and_survives_a_killed_rank(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    from tiny_server import MODEL, eventually, gone, healthy, load, openai_client, running_server

    model, tokenizer, _ = load()
    alone = Engine(model, tokenizer, EngineConfig(num_blocks=1024))
    prompt, settings = "def f(x):", {"max_tokens": 24, "seed": 11}

    def wanted(temperature: float) -> str:
        sampling = Sampling(max_tokens=24, temperature=temperature, seed=11)
        return alone.generate([tokenizer.encode(prompt)], sampling)[0].text

    with ExitStack() as stack:
        running = stack.enter_context(running_server(tmp_path / "stderr", "--tp", "2", fork=False))
        client = stack.enter_context(openai_client(running.url))

        def answer(temperature: float) -> str:
            made = client.completions.create(model=MODEL, prompt=prompt, temperature=temperature, **settings)
            return str(made.choices[0].text)

        assert answer(0.0) == wanted(0.0) and answer(1.0) == wanted(1.0)
        engine = running.engine_pid()
        (rank,) = children(engine)
        stream = client.completions.create(
            model=MODEL, prompt="hello", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        assert next(iter(stream)).choices
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="rank 1 of tp = 2 was killed by SIGKILL"):
            for _ in stream:
                pass
        eventually(lambda: healthy(running), "the engine is back")
        engine, (rank,) = running.engine_pid(), children(running.engine_pid())
        assert answer(0.0) == wanted(0.0)
    eventually(lambda: gone(engine) and gone(rank), "no process is left after the server was killed")
