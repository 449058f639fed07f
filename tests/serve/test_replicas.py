"""Several engine processes behind one server: routing, death of one, and what operators see."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from small_adapters import saved_adapter
from tiny_server import MODEL, Running, eventually, openai_client, running_server
from tiny_server import load as tiny_load

from bagu.errors import ArgumentError, UnknownName
from bagu.serve.config import EngineConfig
from bagu.serve.replicas.options import ReplicaOptions

LONG: dict[str, Any] = {"model": MODEL, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two replicas, each of which runs two choices at a time."""
    flags = ("--replicas", "cpu,cpu", "--max-num-seqs", "2")
    with running_server(tmp_path_factory.mktemp("replicas") / "stderr", *flags) as running:
        yield running


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[Running]:
    """The same, with requests divided by the number of open choices."""
    with running_server(tmp_path / "stderr", "--replicas", "cpu,cpu", "--max-num-seqs", "2", "--router", "queue") as it:
        yield it


def states(running: Running) -> list[str]:
    return [replica["state"] for replica in running.http.get("/health").json()["replicas"]]


def by_replica(running: Running, name: str) -> list[float]:
    text = running.http.get("/metrics").text
    return [float(value) for value in re.findall(rf"^bagu:{name}{{.*}} (\S+)$", text, re.M)]


def complete(client: openai.OpenAI, prompt: str | list[int], **options: Any) -> Any:
    return client.completions.create(model=MODEL, prompt=prompt, temperature=0.0, **options)


def test_replicas_share_the_work_and_answer_alike(two: Running) -> None:
    client = openai_client(two.url)
    assert states(two) == ["ready", "ready"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: complete(client, "hello", max_tokens=40), range(16)))
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert min(by_replica(two, "replica_requests_total")) >= 4
    assert by_replica(two, "replica_open_choices") == [0, 0]


def test_a_prefix_is_sent_to_the_replica_that_has_it(two: Running) -> None:
    """Four groups of long prompts: from the second request on, each finds its prefix."""
    client = openai_client(two.url)
    groups = [[50 + group, *range(3, 203)] for group in range(4)]
    cached = []
    for round in range(3):
        for group in groups:
            usage = complete(client, [*group, 60 + round, 7], max_tokens=1).usage
            cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[:4] == [0] * 4 and min(cached[4:]) >= 192


def test_a_call_of_several_prompts_is_one_answer(two: Running) -> None:
    answer = complete(openai_client(two.url), ["a", "b", "hello", "world"], n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == list(range(8))


def test_a_request_without_a_token_survives_the_death_of_its_replica(mortal: Running) -> None:
    """Both replicas run two streams, and more wait. One is killed: its streams end with an error, the rest finish, new
    requests are answered by the other, and it comes back."""
    client = openai_client(mortal.url)
    streams = [client.completions.create(stream=True, prompt=f"s{i}", **LONG) for i in range(4)]
    begun = [next(iter(stream)) for stream in streams]
    assert all(chunk.choices for chunk in begun)
    engines = mortal.engine_pids()
    for pid in engines:  # no stream ends before the kill, however slowly this process is scheduled
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(complete, client, f"w{i}", max_tokens=4) for i in range(6)]
        eventually(lambda: sum(by_replica(mortal, "replica_open_choices")) == 10, "six requests wait")
        before = by_replica(mortal, "replica_open_choices")
        assert min(before) > 2  # some at each
        os.kill(engines[0], signal.SIGKILL)
        os.kill(engines[1], signal.SIGCONT)
        failed = 0
        for stream in streams:
            try:
                for _ in stream:
                    pass
            except openai.APIError as error:
                assert "SIGKILL" in str(error)
                failed += 1
        assert failed == 2, "the streams of the killed replica end with an error, those of the other do not"
        assert [future.result().choices[0].finish_reason for future in waiting] == ["length"] * 6
    health = mortal.http.get("/health")
    assert health.status_code == 200  # one is enough
    began = time.monotonic()
    assert complete(client, "new", max_tokens=1).choices
    assert time.monotonic() - began < 5  # on an idle machine 0.01 s; the other does not wait for the restart
    eventually(lambda: states(mortal) == ["ready", "ready"], "the killed replica is back")
    assert sorted(by_replica(mortal, "replica_restarts_total")) == [0, 1]
    assert by_replica(mortal, "replica_open_choices") == [0, 0]


def test_embeddings_are_spread(tmp_path: Path) -> None:
    flags = ("--replicas", "cpu,cpu", "--router", "rr", "--kind", "encoder")
    with running_server(tmp_path / "stderr", *flags) as running:
        client = openai_client(running.url)
        vectors = [client.embeddings.create(model=MODEL, input="hello").data[0].embedding for _ in range(4)]
        assert all(vector == vectors[0] for vector in vectors)
        assert by_replica(running, "replica_requests_total") == [2, 2]


def test_replicas_are_read_from_the_command_line() -> None:
    found = ReplicaOptions(replicas="2x cpu:1,cpu:2", min_replicas=1).replication(cores=4, gpus=0)
    assert found is not None and found.least == 1
    specs = found.specs(EngineConfig(), range(4), lambda device: lambda: (device, None, None))  # type: ignore[arg-type, return-value]
    assert [(s.name, s.config.threads, s.config.cores) for s in specs] == [
        ("cpu:1", 1, (0,)),
        ("cpu:1", 1, (1,)),
        ("cpu:2", 2, (2, 3)),
    ]
    auto = ReplicaOptions(replicas="auto").replication(cores=16, gpus=2)
    assert auto is not None and [worker.kind for worker in auto.workers] == ["cuda", "cuda"] and auto.least == 2
    grown = ReplicaOptions(replicas="auto", max_replicas=3).replication(cores=16, gpus=0)
    assert grown is not None and (len(grown.workers), grown.least) == (3, 1)
    assert ReplicaOptions().replication(cores=2, gpus=0) is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_replicas": 2}, "--min-replicas without --replicas"),
        ({"router": "rr"}, "--router without --replicas"),
        ({"replicas": "2", "min_replicas": 0}, "0 to None"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(said)):
        ReplicaOptions(**options)


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(UnknownName):
        ReplicaOptions(replicas="2", router="random")
    with pytest.raises(ArgumentError, match="2 replicas with a GPU"):
        ReplicaOptions(replicas="2x cuda").replication(cores=4, gpus=1)
    with pytest.raises(ArgumentError, match="3 to 2 replicas"):
        ReplicaOptions(replicas="2x cpu", min_replicas=3).replication(cores=4, gpus=0)


@pytest.mark.slow
def test_adapters_are_loaded_at_all_replicas_and_again_after_a_crash(tmp_path: Path) -> None:
    saved_adapter(tiny_load()[0], tmp_path / "one", 1)
    flags = ("--replicas", "cpu,cpu", "--router", "rr", "--max-adapters", "2", "--adapter-root", str(tmp_path))
    with running_server(tmp_path / "stderr", *flags) as running:
        asked = {"lora_name": "one", "lora_path": str(tmp_path / "one")}
        running.http.post("/v1/load_lora_adapter", json=asked).raise_for_status()

        def text() -> str:
            body = {"model": "one", "prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answer = running.http.post("/v1/completions", json=body).raise_for_status().json()
            return str(answer["choices"][0]["text"])

        before = by_replica(running, "replica_requests_total")
        assert len({text() for _ in range(4)}) == 1
        assert [b - a for a, b in zip(before, by_replica(running, "replica_requests_total"), strict=True)] == [2, 2]
        os.kill(running.engine_pids()[0], signal.SIGKILL)
        eventually(lambda: "restarting" in states(running), "one is killed")
        assert text()  # the other has it
        eventually(lambda: states(running) == ["ready", "ready"], "it is back")
        before = by_replica(running, "replica_requests_total")

        def both() -> bool:
            text()
            given = [b - a for a, b in zip(before, by_replica(running, "replica_requests_total"), strict=True)]
            return min(given) > 0

        eventually(both, "the replica that was killed answers for the adapter again")
