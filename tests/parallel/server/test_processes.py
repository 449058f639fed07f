"""Real processes: kills of servers, of a worker and of the manager, and the command of the user."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bagu.bench.server_kills import Servers, record, strike
from bagu.cli import main
from bagu.errors import BaguError
from bagu.parallel.server.client import Client
from bagu.parallel.server.links import Link, connect
from bagu.parallel.server.place import found_place, new_group
from bagu.parallel.server.processes import ManagerProcess
from bagu.parallel.server.wire import Message
from bagu.recipes.catalogue import recipe
from bagu.recipes.command import train_main
from bagu.recipes.held_run import held_run
from bagu.recipes.models import load_model
from bagu.recipes.training import resolved
from bagu.recipes.verbs import TrainOptions
from bagu.runs.folder import RunFolder
from bagu.train import OptimizerConfig, TrainConfig
from bagu.train.served.config import ServedConfig
from bagu.train.served.reader import Reader

pytestmark = pytest.mark.usefixtures("forked")


@pytest.mark.parametrize(("how", "times"), [("kill", 2), ("pair", 2), ("manager", 1), ("slow", 1)])
def test_kills_lose_and_double_nothing(how: str, times: int) -> None:
    found = record(times, how=how, seed=3)
    assert found.wrong == 0 and found.kills == times and found.updates > 0
    if how == "slow":
        assert found.longest_s < found.pause_s + 2.0


def test_servers_that_were_just_killed_do_not_count_as_whole() -> None:
    """Although the manager's last status still has them: a second strike would take the last holder of a range."""
    servers = Servers.__new__(Servers)
    servers.place = new_group(4)
    servers.processes = {("server", n): subprocess.Popen(["sleep", "60"]) for n in range(4)}
    held = {str(n): 0 for n in range(3)}
    servers._status = {"servers": [[n, {"pid": p.pid, "versions": held}] for (_, n), p in servers.processes.items()]}
    try:
        assert servers.whole()
        strike(servers, "pair", random.Random(0))
        assert not servers.whole()
    finally:
        servers.close()


def test_a_record_ends_with_the_error_of_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("the worker's own error")

    monkeypatch.setattr(Client, "push", fail)
    with pytest.raises(ZeroDivisionError, match="the worker's own error"):
        record(1)


def test_the_status_of_a_server_that_came_back_is_not_that_of_the_one_before() -> None:
    place = new_group(1)
    manager, answers = ManagerProcess(1, *place.manager, place.token), queue.SimpleQueue[Message]()

    def joined(birth: int) -> Link:
        more = {"who": "server", "number": 0, "birth": birth, "versions": {"0": -1}, "host": "", "port": 0}
        hello = Message(kind="hello", more=more)
        return connect(place.manager, place.token, hello, lambda _, m: answers.put(m), lambda _: None)

    def status(link: Link) -> dict[str, Any]:
        link.send(Message(kind="status"))
        while (m := answers.get(timeout=30)).kind != "status":
            pass
        return dict(m.more["servers"])[0]

    try:
        first = joined(birth=1)
        first.send(Message(kind="beat", more={"versions": {"0": 7}, "pid": 1}))
        assert status(first) == {"versions": {"0": 7}, "pid": 1}
        assert status(joined(birth=2)) == {"versions": {"0": -1}}
    finally:
        manager.close()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "times"), [("kill", 100), ("pair", 50), ("stop", 3), ("manager", 10)])
def test_the_record_of_kills(how: str, times: int) -> None:
    found = record(times, how=how)
    assert found.wrong == 0
    if how == "stop":
        assert found.longest_s < 2.5


SMALL = (
    "data.context=32", "data.rows=2", "data.micro_batches=2", "model.hidden_size=32", "model.num_layers=1",
    "model.num_heads=2", "model.num_kv_heads=2", "model.head_dim=16", "model.intermediate_size=32",
    "tokenizer.vocab_size=300", "train.eval_every=null", "train.sample_every=null", "train.save_every=20",
    "train.optimizer.kind=adamw", "train.optimizer.lr=0.001", "dtype=fp32",
)  # fmt: skip


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model/model.safetensors")


def closest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def test_a_run_survives_kills_and_resumes_with_fewer_servers(tmp_path: Path, capfd: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n} is followed by {n + 1}, and twice {n} is {2 * n}." for n in range(1500)))
    options: dict[str, Any] = {"data": (str(text),), "settings": SMALL}
    assert train_main(TrainOptions(**options, steps=60, out=tmp_path / "alone")) == 0

    out, struck, read = tmp_path / "ps", list[str](), list[int]()

    def strike() -> None:
        """Kill server 1 when the run is under way, and worker 1 when it goes on. Of a worker and a server that die
        within one update a part of it may be lost: then the run ends with a sentence."""
        while len(struck) < 2:
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
                status = json.loads((out / "servers.json").read_text())
                servers, workers = dict(status["servers"]), dict(status["workers"])
                step = min(workers[0]["step"], workers[1]["step"])
                if not struck and step > 5:
                    reader = Reader(load_model(tmp_path / "alone"), found_place(out))
                    assert reader.refresh() and (out / "place.json").stat().st_mode & 0o077 == 0
                    read.append(reader.version)
                    reader.close()
                    os.kill(servers[1]["pid"], signal.SIGKILL)
                    struck.append("server")
                    killed_at = step
                elif struck and status["deaths"] and step > killed_at + 2:
                    os.kill(workers[1]["pid"], signal.SIGKILL)
                    struck.append("worker")
            time.sleep(0.05)

    threading.Thread(target=strike, daemon=True).start()
    assert train_main(TrainOptions(**options, steps=60, out=out, servers=3, workers="2")) == 0
    said = capfd.readouterr().err
    assert struck == ["server", "worker"] and 5 < read[0] < 60
    with pytest.raises(BaguError, match="is not a run whose parameter servers are running"):
        found_place(out)
    assert "server 1 has died: started again" in said and "worker 1 has died: started again" in said
    assert closest(weights(tmp_path / "alone"), weights(out)) < 1e-4

    main_status(["watch", str(out), "--once"])
    assert "range 2: server" in capfd.readouterr().out
    main_status(["watch", str(out), "--delay", "4", "--once"], code=2)
    assert "began without a delay" in capfd.readouterr().err and not (out / "delay.json").exists()
    assert "Age of the weights" in (out / "report.html").read_text()
    more = {"steps": 70, "resume": True}
    assert train_main(TrainOptions(out=tmp_path / "alone", **more)) == 0
    assert train_main(TrainOptions(out=out, servers=1, workers="1", **more)) == 0
    assert closest(weights(tmp_path / "alone"), weights(out)) < 1e-4


def main_status(words: list[str], code: int = 0) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"servers": 2, "nproc": 2}, "--servers and --nproc"),
        ({"delay": 2}, "without --servers"),
        ({"servers": 2, "delay": 99}, "delay is 99"),
        ({"servers": 2, "compress": "zip"}, "no compression 'zip'"),
        ({"servers": 2, "settings": ("train.optimizer.kind=muon",)}, "whole matrices"),
        ({"servers": 2, "recipe": "grpo", "start": "x"}, "one engine"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_work_is_refused_in_a_sentence(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(BaguError, match=words):
        train_main(TrainOptions(**{"out": tmp_path / "run", **more}))


def test_resume_auto_takes_another_number_of_servers_and_no_other_change(tmp_path: Path) -> None:
    served = ServedConfig(servers=4, workers=2)
    train = TrainConfig(served=served, optimizer=OptimizerConfig(kind="adamw"))
    run = resolved(replace(recipe("small"), train=train), torch.device("cpu"))
    folder = RunFolder.create(tmp_path / "run", run)
    folder.close()
    for other in (replace(served, servers=3), replace(served, workers=4)):
        wanted = replace(run, train=replace(run.train, served=other))
        assert held_run(wanted, folder, fitted=True).train.served == other
    wanted = replace(run, train=replace(run.train, served=replace(served, delay=2)))
    with pytest.raises(BaguError, match=r"holds another run: train\.served\.delay"):
        held_run(wanted, folder, fitted=True)
