"""Growing and shrinking: the decision alone, and with processes that start warm and end drained."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny_server

from bagu.serve.config import EngineConfig
from bagu.serve.http.errors import ApiError
from bagu.serve.http.observe.metrics import Metrics, metrics_text
from bagu.serve.http.pending import PendingCall, PendingCalls
from bagu.serve.replicas.make import Replicas
from bagu.serve.replicas.options import ReplicaOptions, ReplicaSpec, Replication
from bagu.serve.replicas.replica_set import ReplicaSet
from bagu.serve.replicas.scale import Scaler
from bagu.serve.repository.version import Engine, Version
from bagu.serve.request import Request, Sampling

LOADING_S = 4.0  # until a replica that is started takes requests


async def _until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + tiny_server.PATIENCE_S
    while not condition():
        assert time.monotonic() < end, what
        await asyncio.sleep(0.02)


def two_engines(
    config: EngineConfig, least: int | None = None
) -> tuple[Callable[..., Any], Replication, tuple[ReplicaSpec, ...]]:
    """What loads the tiny model, and two replicas of it on a CPU."""
    plan = ReplicaOptions(replicas="2x cpu", min_replicas=least).replication(cores=2, gpus=0)
    assert plan is not None
    load = partial(tiny_server.load)
    return load, plan, plan.specs(config, sorted(os.sched_getaffinity(0)), lambda device: load)


def numbers(work: float, seconds: float, *, least: int = 1, most: int = 4, begin: int = 1) -> list[int]:
    """How many replicas there are, every 0.25 s, if `work` replicas' worth of requests arrive: what is above the
    number is a queue that grows."""
    scaler, ready, queue, starting, found = Scaler(least, most), begin, 0.0, 0.0, list[int]()
    for tick in range(int(seconds / 0.25)):
        now = tick * 0.25
        if starting and now >= starting:
            ready, starting = ready + 1, 0.0
        queue = max(0.0, queue + 0.25 * (work - ready))
        busy = min(float(ready), work if queue == 0 else ready)
        change = scaler.decide(now, ready=ready, changing=int(starting > 0), wait_s=queue / ready, busy=busy)
        if change == "grow":
            starting = now + LOADING_S
        elif change == "shrink":
            ready -= 1
        found.append(ready)
    return found


def test_the_number_follows_the_work_and_stays() -> None:
    """The trap of autoscalers that look at queues: they grow, find the queue empty, shrink, and grow again."""
    for work, wanted in ((0.3, [1]), (1.5, [2]), (2.5, [3, 4]), (9.0, [4])):  # 2.5: a long queue may be worth a fourth
        found = numbers(work, 600)
        assert found[-1] in wanted and found == sorted(found), "it never shrinks and grows again"


def test_it_shrinks_when_the_work_has_gone_and_not_below_the_least() -> None:
    found = numbers(0.1, 300, begin=4, least=2)
    assert found[0] == 4 and found[-1] == 2 and found.index(3) * 0.25 >= 29


def test_a_short_burst_starts_nothing() -> None:
    scaler = Scaler(1, 2)
    decided = [scaler.decide(t / 4, ready=1, changing=0, wait_s=5.0 if t < 6 else 0.0, busy=1.0) for t in range(40)]
    assert decided == [None] * 40


@pytest.mark.usefixtures("forked")
def test_a_replica_starts_warm_and_ends_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real processes: requests that wait start the second one; it finishes its stream before it ends."""

    async def run() -> None:
        config = EngineConfig(max_num_seqs=1, num_blocks=1024, max_num_batched_tokens=512)
        _, _, specs = two_engines(config, 1)
        scaler = Scaler(1, 2, grow_wait_s=0.2, grow_for_s=0.5, shrink_load=1.0, shrink_for_s=0.5)
        engines = ReplicaSet(specs, PendingCalls(64, Metrics("tiny")), scaler=scaler)
        engines.start()
        await engines.wait_until_settled()
        assert [r["state"] for r in engines.describe()] == ["ready", "stopped"]

        def request(id: str, tokens: int) -> Request:
            return Request(id=id, prompt=(5, 6, 7), sampling=Sampling(max_tokens=tokens, ignore_eos=True))

        calls = [engines.submit([request(f"long {i}", 2500)]) for i in range(30)]
        await _until(lambda: len(engines.serving) == 2, "a second replica takes requests")
        stream = engines.submit([request("last", 800)])
        assert engines.replicas[1].load is not None and engines.replicas[1].load.choices == 1, "the idle one has it"
        for call in calls:
            engines.close(call)
        await _until(lambda: engines.replicas[1].state == "draining", "there is work for one only")
        tokens = 0
        while events := await stream.read():
            tokens += len(events)
        assert tokens == 800
        await _until(lambda: engines.replicas[1].state == "stopped", "it ends after its stream")
        assert engines.state == "ready" and engines.unhealthy_reason() is None
        await engines.stop()

    monkeypatch.setattr("bagu.serve.replicas.replica_set.NICENESS", 0)  # a busy machine would not load it in time
    asyncio.run(run())


@pytest.mark.slow  # 27 s of waiting
def test_a_stopped_replica_loses_its_waiting_requests_and_then_its_streams() -> None:
    """SIGSTOP: the process lives and says nothing. Requests without a token go to the other replica after `silent_s`,
    new ones do not come, and after `stall_s` the process is killed and started again."""

    async def run() -> None:
        config = EngineConfig(max_num_seqs=1, num_blocks=512, max_num_batched_tokens=512)
        _, _, specs = two_engines(config)
        pending = PendingCalls(64, Metrics("tiny"))
        engines = ReplicaSet(specs, pending, router="rr", silent_s=5.0, stall_s=10.0)
        engines.start()
        await engines.wait_until_settled()

        def submit(id: str, tokens: int) -> PendingCall:
            return engines.submit(
                [Request(id=id, prompt=(5, 6, 7), sampling=Sampling(max_tokens=tokens, ignore_eos=True))]
            )

        other, stopped = submit("on 1", 3000), submit("on 0", 3000)  # `rr` begins with the second
        assert await other.read() and await stopped.read()
        first = engines.replicas[0].process
        assert first is not None and first.pid is not None
        os.kill(first.pid, signal.SIGSTOP)
        waiting = [submit(f"waiting {i}", 4) for i in range(4)]
        given = [replica.load.choices for replica in engines.replicas if replica.load is not None]
        assert given == [3, 3], "two wait at the stopped one"
        engines.close(other)  # else they wait for its end
        for call in waiting:
            tokens = 0
            while events := await call.read():
                tokens += len(events)
            assert tokens == 4
        assert first.state == "ready", "they did not wait for its end"
        late = submit("late", 4)
        assert await late.read(), "it goes to the one that answers"
        with pytest.raises(ApiError, match="no message for"):
            while await stopped.read():
                pass
        await _until(lambda: len(engines.serving) == 2, "the killed one is started again")
        assert [replica.restarts for replica in engines.replicas] == [1, 0]
        for call in (late, *waiting):
            engines.close(call)
        assert pending.choices == 0
        await engines.stop()

    asyncio.run(run())


@pytest.mark.usefixtures("forked")
def test_a_version_of_a_repository_may_have_replicas() -> None:
    """Hot swap and drain know one engine; here it is two processes."""

    async def run() -> None:
        config = EngineConfig(max_num_seqs=2, num_blocks=256, max_num_batched_tokens=512)
        load, plan, specs = two_engines(config)
        version = Version("chat", 1)
        engine = Engine(load, config, Replicas(specs, plan.least))
        assert await version.load(engine, 0.5, max_queue=8, stall_s=60.0, niceness=0) is None
        assert version.is_ready and version.instance is not None
        engines = version.instance.engine
        assert [replica["state"] for replica in engines.describe()] == ["ready", "ready"]
        call = engines.submit([Request(id="r", prompt=(5,), sampling=Sampling(max_tokens=100, ignore_eos=True))])
        draining = asyncio.create_task(version.drain(60.0))
        tokens = 0
        while events := await call.read():
            tokens += len(events)
        engines.close(call)
        await draining
        assert tokens == 100 and version.state == "unloaded"
        lines = metrics_text(Metrics("server"), [(version.metrics, None)])
        assert lines.count("# HELP bagu:replica_state ") == 1 and 'version="1",replica="1"' in lines

    asyncio.run(run())
