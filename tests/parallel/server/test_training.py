"""Training on servers over real sockets, all in this process: it equals the run in one process."""

from __future__ import annotations

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

sys.path.insert(0, str(Path(__file__).parents[1]))  # tiny.py, as its neighbours import it
import tiny
from tiny import Case

from bagu.errors import BaguError
from bagu.parallel.server.compress import Compressor, decode, encoded_bytes
from bagu.parallel.server.place import Place, new_group
from bagu.parallel.server.processes import ManagerProcess, ServerProcess
from bagu.parallel.server.rules import update_of
from bagu.recipes.rollout import EngineSampler, ServedSampler, engine_config
from bagu.train import OptimizerConfig, TrainConfig, TrainState
from bagu.train.prepare import prepared
from bagu.train.served.config import ServedConfig
from bagu.train.served.reader import Reader
from bagu.train.served.worker import Served, ServedPlace


class Local:
    """A manager and servers on sockets of this process."""

    def __init__(self, servers: int) -> None:
        self.place: Place = new_group(servers)
        self.manager = ManagerProcess(servers, *self.place.manager, self.place.token)
        self.servers = [self.server(slot) for slot in range(servers)]

    def server(self, slot: int) -> ServerProcess:
        return ServerProcess(slot, self.place.servers, self.place.manager, self.place.token, update_of)

    def close(self) -> None:
        for process in (*self.servers, self.manager):
            process.close()


@pytest.fixture
def local() -> Iterator[Any]:
    made: list[Local] = []

    def start(servers: int) -> Local:
        made.append(Local(servers))
        return made[-1]

    yield start
    for each in made:
        each.close()


def train(case: Case, local: Local, worker: int, served: ServedConfig, found: dict[int, Any], stop: int) -> None:
    how = replace(tiny.config(case, alone=True), served=served)
    made, data = tiny.model(case), tiny.loader(case.micro_batches)
    state = TrainState(made, how)
    place = ServedPlace(worker=worker, manager=local.place.manager, token=local.place.token)
    mine = Served(place, served)
    batches = iter(data.batch(s) for s in range(10_000))
    try:
        with prepared(state.model, how, tiny.CPU):
            mine.begin(state)
            mine.stop = stop
            losses, rows = [], []
            while state.step < stop:
                result = mine.step(state, lambda: next(batches))
                losses.append((result.loss, result.grad_norm))
                rows.append(mine.row())
            if worker == 0:
                mine.fetch(state)
        weights = {name: t.detach().clone() for name, t in made.state_dict().items()}
        found[worker] = (losses, weights, rows, state)
    except BaseException as error:
        found[worker] = error
        raise
    finally:
        mine.close()


def run(case: Case, local: Local, served: ServedConfig) -> dict[int, Any]:
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=train, args=(case, local, w, served, found, case.steps)) for w in range(served.workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == served.workers and not any(isinstance(f, BaseException) for f in found.values()), found
    return found


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("sgd", 2),
        ("adamw", 4),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("sgd", 1), ("adamw", 2), ("lion", 2), ("lion", 4))),
    ],
)
def test_delay_0_equals_the_run_in_one_process(kind: str, workers: int, local: Any) -> None:
    """20 steps in fp64, with clipping; tests/parallel/test_equality.py shows that all-reduce gives the same."""
    case = Case(name="", optimizer={"kind": kind})
    losses, weights = tiny.run(case, alone=True)
    group = local(3)
    found = run(case, group, ServedConfig(servers=3, workers=workers))
    worst = 0.0
    for mine, others, _, _ in found.values():
        assert np.allclose(mine, losses, rtol=1e-10, atol=0)
        worst = max(worst, *(float((weights[n] - others[n]).abs().max()) for n in weights))
    assert worst < 1e-10, worst
    state = found[0][3]
    rows = found[0][2]
    size = len(state.flat.master) * 8
    assert all(row["pushed_bytes"] == size and row["read_age_updates"] == 0 for row in rows)  # exactly the formula


@pytest.mark.parametrize("kind", ["momentum", "nesterov", "adagrad", "adadelta", "rmsprop", "adam"])
def test_every_elementwise_rule_runs_on_servers(kind: str, local: Any) -> None:
    case = Case(name="", optimizer={"kind": kind}, steps=3, micro_batches=2)
    _, weights = tiny.run(case, alone=True)
    found = run(case, local(2), ServedConfig(servers=2, workers=2))
    assert all(float((weights[n] - found[0][1][n]).abs().max()) < 1e-10 for n in weights)


def test_muon_is_refused_with_the_reason() -> None:
    with pytest.raises(BaguError, match="whole matrices"):
        TrainConfig(optimizer=OptimizerConfig(kind="muon"), served=ServedConfig())
    TrainConfig(optimizer=OptimizerConfig(kind="muon"), served=ServedConfig(local_steps=4))  # it runs on the workers


def test_a_delay_is_bounded_and_recorded(local: Any) -> None:
    found = run(Case(name="", steps=12, micro_batches=2), local(3), ServedConfig(servers=3, workers=2, delay=2))
    ages = [row["read_age_updates"] for _, _, rows, _ in found.values() for row in rows]
    assert max(ages) <= 2
    (_, first, _, _), (_, second, _, _) = found.values()
    assert all(torch.equal(first[name], second[name]) for name in first)  # both read the last version


def test_rollouts_are_sampled_from_weights_of_a_bounded_age(local: Any) -> None:
    """An engine of another process reads by the workers' client, and only when its weights are too old."""
    group, served = local(3), ServedConfig(servers=3, workers=1)
    case = Case(name="", micro_batches=2, dtype=torch.float32, steps=4)
    run(case, group, served)
    model = tiny.model(case)
    reader = Reader(model, group.place, most_age=2)
    config = engine_config(answers=2, max_len=tiny.CONTEXT, invariant=True)
    sampler, asked = ServedSampler(model, None, config, reader), {"n": 2, "max_tokens": 8, "seeds": [7]}
    sampler.weights_changed()
    first = sampler.sample([[1, 2, 3]], **asked)
    trained = run(replace(case, steps=6), group, served)  # goes on from the servers
    sampler.weights_changed()
    assert reader.version == 4 and sampler.sample([[1, 2, 3]], **asked) == first  # two updates old: kept
    trained = run(replace(case, steps=7), group, served)
    wait_for_beat(group, 7)
    sampler.weights_changed()
    found, wanted = model.state_dict(), trained[0][1]
    assert reader.version == 7 and all(torch.equal(found[name], wanted[name]) for name in wanted)
    own = EngineSampler(trained[0][3].model, None, config)
    assert sampler.sample([[1, 2, 3]], **asked) == own.sample([[1, 2, 3]], **asked)
    reader.close()


def wait_for_beat(group: Local, version: int) -> None:
    """Until the manager knows that the servers have a version."""
    deadline = time.monotonic() + 30
    while any(v < version for _, facts in group.manager.status()["servers"] for v in facts["versions"].values()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_servers_count_the_bytes_of_copies(local: Any) -> None:
    """Two copies of each sum beside the pushes of two workers: twice the bytes, and headers."""
    group, served = local(3), ServedConfig(servers=3, workers=2)
    case = Case(name="", micro_batches=2, dtype=torch.float32, steps=4)
    run(case, group, served)
    wait_for_beat(group, 4)
    before = received(group)
    found = run(replace(case, steps=12), group, served)
    wait_for_beat(group, 12)
    pushed = sum(row["pushed_bytes"] for _, _, rows, _ in found.values() for row in rows)
    assert 2 <= (received(group) - before) / pushed < 2.3


def received(group: Local) -> int:
    return sum(facts["received"] for _, facts in group.manager.status()["servers"])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_local_steps_exchange_rarely_and_workers_end_equal(kind: str, local: Any) -> None:
    served = ServedConfig(servers=3, workers=2, local_steps=4)
    found = run(
        Case(name="", steps=8, micro_batches=2, dtype=torch.float32, optimizer={"kind": kind}), local(3), served
    )
    (losses, first, rows, _), (_, second, _, _) = found.values()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sum(row["pushed_bytes"] > 0 for row in rows) == 2
    assert losses[-1][0] < losses[0][0]


@pytest.mark.parametrize(("method", "share"), [("int8", 0.26), ("topk", 0.1)])
def test_compression_sends_few_bytes_and_feedback_loses_nothing(method: Any, share: float) -> None:
    stream, compressor = np.random.default_rng(0), Compressor(method)
    total, sent = np.zeros(10_000, np.float32), np.zeros(10_000, np.float32)
    for _ in range(50):
        gradient = stream.standard_normal(10_000).astype(np.float32)
        data = compressor.encode(0, gradient)
        assert len(data) == encoded_bytes(method, 10_000, gradient.dtype) <= share * gradient.nbytes
        total += gradient
        sent += decode(method, data, 10_000, gradient.dtype)
    assert np.allclose(sent + compressor.residual[0], total, atol=1e-3)
    nan = np.full(10_000, np.nan, np.float32)
    assert not np.isfinite(decode(method, compressor.encode(0, nan), 10_000, nan.dtype)).all()  # the guard sees it
    assert np.isfinite(compressor.residual[0]).all()


def stop_after_two_updates(process: ServerProcess) -> None:
    """Not before all servers have joined: there would never be a map."""
    deadline = time.monotonic() + 60
    while max(process.server.versions.values(), default=-1) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.close()


def test_a_server_that_stops_in_a_run_changes_no_bit(local: Any) -> None:
    case = Case(name="", steps=10, micro_batches=2)
    _, weights = tiny.run(case, alone=True)
    group = local(4)
    stopper = threading.Thread(target=stop_after_two_updates, args=(group.servers[1],))
    stopper.start()
    found = run(case, group, ServedConfig(servers=4, workers=2))
    stopper.join()
    assert all(float((weights[n] - found[0][1][n]).abs().max()) < 1e-10 for n in weights)
