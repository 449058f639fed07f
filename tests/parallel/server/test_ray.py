"""Ray places the processes: one start for the whole file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_processes import SMALL

from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.parallel.server import on_ray
from bagu.parallel.server.client import Client
from bagu.parallel.server.group import SERVER
from bagu.parallel.server.place import new_group
from bagu.recipes.command import train_main
from bagu.recipes.loader import Loader
from bagu.recipes.models import save_model
from bagu.recipes.replicas import find_replication, replicas_of
from bagu.recipes.verbs import TrainOptions
from bagu.runs.folder import RunFolder
from bagu.serve.config import EngineConfig
from bagu.serve.http.errors import ApiError
from bagu.serve.http.launch import EngineStart
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.pending import PendingCall, PendingCalls
from bagu.serve.replicas.options import ReplicaOptions
from bagu.serve.replicas.replica_set import ReplicaSet
from bagu.serve.request import Request, Sampling, TokenEvent
from bagu.serve.worker.connect import Offer

pytestmark = pytest.mark.usefixtures("forked")  # the processes that are no actors


@pytest.fixture(scope="module")
def start() -> Iterator[on_ray.OnRay]:
    pytest.importorskip("ray")
    started = on_ray.OnRay("local")
    yield started
    started.ray.shutdown()


@pytest.mark.slow
def test_a_server_actor_is_killed_and_its_values_stay(start: on_ray.OnRay) -> None:
    place = new_group(3)
    manager = start(place, SERVER)
    servers: list[Any] = [start(replace(place, role="server", number=n), []) for n in range(3)]
    rule = {"kind": "sgd", "servers": 3, "segments": [[0, 4096, {"weight_decay": 0.0}]]}
    client = Client(0, [(0, 4096)], 3, np.dtype(np.float64), place.manager, place.token)
    client.wait_for_map()
    client.load(0, [np.zeros(4096)], rule, 1, {"facts": {}})
    flat = np.zeros(4096)
    for t in range(1, 9):
        if t == 4:
            os.kill(servers[1].pid, signal.SIGKILL)
        client.push(t, np.full(4096, float(t)), [0.0])
        client.total(t)
        client.commit(t, {"lr": 1.0, "scale": 1.0, "step": t, "facts": {}})
        client.read(flat)
        assert (flat == -t * (t + 1) / 2).all()
    deadline = time.monotonic() + 20
    while servers[1].poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert servers[1].poll() == -9 and servers[0].poll() is None and manager.poll() is None
    client.close()
    for process in (manager, *servers):
        process.kill()


def test_a_run_on_ray_outlives_a_server(start: on_ray.OnRay, tmp_path: Path, capfd: Any) -> None:
    """`bagu train --ray`, with the Ray of this process: a worker imports torch, so there is one short run."""
    text, out, struck = tmp_path / "text.txt", tmp_path / "run", list[int]()
    text.write_text("\n".join(f"{n} is followed by {n + 1}, and twice {n} is {2 * n}." for n in range(1500)))

    def strike() -> None:
        while not struck:
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError):
                status = json.loads((out / "servers.json").read_text())
                if dict(status["workers"]).get(1, {}).get("step", 0) > 5:
                    struck.append(dict(status["servers"])[1]["pid"])
                    os.kill(struck[0], signal.SIGKILL)
            time.sleep(0.05)

    threading.Thread(target=strike, daemon=True).start()
    asked = TrainOptions(data=(str(text),), settings=SMALL, steps=40, out=out, servers=2, workers="2", ray="local")
    assert train_main(asked) == 0
    assert struck and "server 1 has died: started again" in capfd.readouterr().err
    assert RunFolder(out).metrics()[-1]["step"] == 39


@pytest.mark.slow
def test_replicas_on_ray_answer_as_one_and_come_back(start: on_ray.OnRay, tmp_path: Path) -> None:
    """`bagu serve --replicas --ray`, with the Ray of this process: two engines, one of which is killed."""
    words = BpeTokenizer.train(["hello world"], vocab_size=300)
    config = ModelConfig(
        vocab_size=300, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
        max_len=2048,
    )  # fmt: skip
    save_model(init_weights(Transformer(config, dtype=torch.float32), 0), words, tmp_path)
    options = ReplicaOptions(replicas="2x cpu:1", ray="local", router="rr")
    found = replicas_of(
        find_replication(options), Loader(model=str(tmp_path), dtype="fp32"), EngineConfig(max_num_seqs=1)
    )
    assert found is not None

    async def run() -> None:
        engines = ReplicaSet(found.specs, PendingCalls(16, Metrics("tiny")), router=found.router)
        engines.start()
        await engines.wait_until_settled()
        assert [r["state"] for r in engines.describe()] == ["ready", "ready"], engines.failure

        def submit(id: str, tokens: int) -> PendingCall:
            return engines.submit(
                [Request(id=id, prompt=(5, 6), sampling=Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True))]
            )

        async def tokens(call: PendingCall) -> list[int | None]:
            read: list[int | None] = []
            while events := await call.read():
                read += [event.token for event in events if isinstance(event, TokenEvent)]
            return read

        streams = [submit(f"stream {n}", 2000) for n in range(2)]  # the first on the second one
        for stream in streams:
            assert await stream.read()
        waiting = [submit(f"waiting {n}", 6) for n in range(4)]
        killed = engines.replicas[0].process
        assert killed is not None and killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        with pytest.raises(ApiError, match="SIGKILL"):
            await tokens(streams[1])
        answers = [await tokens(call) for call in waiting]
        assert len(answers[0]) == 6 and answers == answers[:1] * 4
        while len(engines.serving) < 2:
            await asyncio.sleep(0.05)
        await engines.stop()

    asyncio.run(asyncio.wait_for(run(), 120))
    wanted = start.ray.cluster_resources()["CPU"]
    deadline = time.monotonic() + 20
    while start.ray.available_resources().get("CPU") != wanted and time.monotonic() < deadline:
        time.sleep(0.1)
    assert start.ray.available_resources()["CPU"] == wanted, "the cores of the engines are free again"


def test_an_engine_without_the_key_is_refused() -> None:
    """The port is open to the cluster's network; what connects must have the key before anything is unpickled."""
    offer = Offer("127.0.0.1")
    with socket.create_connection(offer.address) as stranger:
        stranger.sendall(b"x" * 64)
        start = EngineStart(lambda: None, EngineConfig(), None, 0)  # type: ignore[arg-type, return-value]
        assert offer.accept(start, 5.0) is None
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert len(stranger.recv(1000)) <= 64 and not stranger.recv(1000), "a nonce and a signature, and no more"
    offer.close()


def test_without_ray_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BaguError, match="not installed") as error:
        on_ray.import_ray()
    assert "bagu[ray]" in error.value.hint
