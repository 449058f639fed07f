"""A run on a CPU that other processes use: fewer threads, said once, and a resume that says so."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import Notes, loader, model

from bagu.machine.busy import ThreadPolicy
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.train import TrainConfig, checkpoint, fit


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def busy_between(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> list[int]:
    """Let the policy ask for one thread in calls first to last; returns the numbers that it was called with."""
    seen: list[int] = []

    def following(self: ThreadPolicy, now: int) -> int:
        seen.append(now)
        return 1 if first <= len(seen) <= last else self.most

    monkeypatch.setattr(ThreadPolicy, "next", following)
    return seen


def test_a_run_goes_on_with_fewer_threads_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    notes, seen = Notes(), busy_between(monkeypatch, 3, 5)
    fit(TrainConfig(steps=8), model(), loader(), folder=tmp_path, observers=[notes])
    assert seen == [2, 2, 2, 1, 1, 1, 2, 2]
    assert [(e["step"], e["threads"], e["of"]) for e in notes.of("busy_machine")] == [(2, 1, 2)]
    assert [(e["step"], e["threads"]) for e in notes.of("threads")] == [(5, 2)]
    newest, _ = checkpoint.newest_good(tmp_path)
    assert newest is not None and checkpoint.state_of(newest)["steps_on_fewer_threads"] == 3
    fit(TrainConfig(steps=9), model(), loader(), folder=tmp_path, observers=[notes], resume=True)
    (resumed,) = notes.of("resume")
    assert resumed["steps_on_fewer_threads"].startswith("3: ")


def test_the_threads_of_a_run_that_ends_on_a_busy_machine_are_set_again(
    monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    busy_between(monkeypatch, 2, 99)
    fit(TrainConfig(steps=3), model(), loader())
    assert torch.get_num_threads() == 2


def test_a_deterministic_run_keeps_its_threads(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    seen = busy_between(monkeypatch, 1, 99)
    fit(TrainConfig(steps=3, deterministic=True), model(), loader())
    assert seen == []


def test_an_engine_decodes_with_fewer_threads_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    prompts, asked = [[1, 2, 3]], Sampling(max_tokens=8, temperature=0.0)
    config = EngineConfig(num_blocks=16, max_num_seqs=2)
    whole = Engine(model(), None, replace(config, adjust_threads=False)).generate(prompts, asked)[0].tokens
    seen = busy_between(monkeypatch, 2, 4)
    engine = Engine(model(), None, config)
    with pytest.warns(RuntimeWarning, match="1 of 2 threads") as said:
        busy = engine.generate(prompts, asked)[0].tokens
    assert busy == whole and seen[:6] == [2, 2, 1, 1, 1, 2]
    assert len([w for w in said if "threads" in str(w.message)]) == 1
