"""Operations on a repository while the versions of the start are loading."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bagu.serve.config import GenerationDefaults
from bagu.serve.http.instances import Instance
from bagu.serve.repository.repository import Repository


def test_a_version_promoted_during_the_start_replaces_the_one_that_is_loading(tmp_path: Path) -> None:
    """The first version stayed loaded, without traffic, if it became ready after the promotion."""
    for version in "12":
        (tmp_path / "chat" / version).mkdir(parents=True)
    (tmp_path / "chat" / "model.toml").write_text("weights = {1 = 1}")

    def unused(*_: Any) -> Any:
        raise AssertionError("no process is started here")

    async def play() -> list[int]:
        model = Repository(tmp_path, unused, max_queue=1, stall_s=60.0).models["chat"]

        async def stop() -> None:
            pass

        async def load(number: int) -> None:
            await asyncio.sleep(0.5 if number == 1 else 0.0)
            engine: Any = SimpleNamespace(state="ready", pending=SimpleNamespace(choices=0), stop=stop)
            model.versions[number].instance = Instance(engine, f"chat@{number}", GenerationDefaults())

        model._load = load  # type: ignore[method-assign]
        start = asyncio.create_task(model.start())
        await asyncio.sleep(0)
        await model.promote(2)
        await start
        await asyncio.gather(*model._tasks)
        return [version.number for version in model.loaded]

    assert asyncio.run(play()) == [2]
