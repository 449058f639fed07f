"""What a repository adds to a request: finding the model and version, the API key's limits, the shadow copy."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bagu.serve.config import GenerationDefaults
from bagu.serve.http.instances import Caller, Instance
from bagu.serve.http.keys import Key, KeyUse
from bagu.serve.repository.repository import Repository

BAR_S = 200e-6  # of CPU time for each request


@pytest.mark.parametrize("user", [None, "alice"])
def test_a_repository_costs_less_than_a_fifth_of_a_millisecond(tmp_path: Path, user: str | None) -> None:
    """CPU time, the best of five: other processes cannot raise it to 15 times the 14 µs measured on a Neoverse-N1."""
    for version in "12":
        (tmp_path / "chat" / version).mkdir(parents=True)
    (tmp_path / "chat" / "model.toml").write_text("weights = {1 = 90, 2 = 10}")

    def unused(*_: Any) -> Any:
        raise AssertionError("no version is loaded here")

    async def receive() -> Any:
        raise AssertionError("nothing waits here")

    async def measure() -> float:
        repository = Repository(tmp_path, unused, max_queue=1, stall_s=60.0)
        for version in repository.models["chat"].versions.values():
            engine: Any = SimpleNamespace(state="ready", require_ready=lambda: None, adapters={})
            version.instance = Instance(engine, version.name, GenerationDefaults())
        key, times = KeyUse(Key(name="a", key="k", requests_per_minute=10**9)), list[float]()
        for _ in range(5):
            began = time.process_time()
            for _ in range(500):
                key.admit(time.time())
                instance = await repository.find("chat", Caller("a", user), receive)
                key.check_model("chat", instance.name.partition("@")[0])
                with instance.in_use():
                    pass
                repository.copy(instance, SimpleNamespace())  # type: ignore[arg-type]
                key.charge(10, time.time())
            times.append((time.process_time() - began) / 500)
        return min(times)

    assert asyncio.run(measure()) < BAR_S
