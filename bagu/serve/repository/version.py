"""One version of a model: an engine process while it is loaded, and its metrics."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from bagu.errors import BaguError
from bagu.serve.config import EngineConfig
from bagu.serve.http.instances import HasJob, Instance
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.replicas.make import Replicas, make_engine
from bagu.serve.repository.layout import Settings
from bagu.serve.wire.messages import Load

State = Literal["unloaded", "loading", "warming", "ready", "restarting", "draining", "failed"]


class Engine(NamedTuple):
    """How the engine process of a version is started."""

    load: Load
    config: EngineConfig
    replicas: Replicas | None = None


Prepare = Callable[[Path, Settings, float], Engine]  # of the version in this folder, with this share of the memory


class Version:
    """`share` is the memory that it occupies while it is loaded, as a fraction."""

    def __init__(self, model: str, number: int) -> None:
        self.number, self.name = number, f"{model}@{number}"
        self.metrics = Metrics(model, version=number)
        self.instance: Instance | None = None  # while it is loaded
        self.share = 0.0
        self.reason = ""  # why it is not loaded
        self._failed = self._draining = False

    @property
    def state(self) -> State:
        if self.instance is None:
            return "failed" if self._failed else "unloaded"
        if self._draining:
            return "draining"
        state = self.instance.engine.state
        return "unloaded" if state == "stopped" else state

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    async def load(self, engine: Engine, share: float, *, max_queue: int, stall_s: float, niceness: int) -> str | None:
        """Start the engine and wait until it is ready; returns the reason if it fails. Cancelling stops it."""
        self.share, self.reason, self._failed, self._draining = share, "", False, False
        process = make_engine(
            engine.load,
            engine.config,
            self.metrics,
            max_queue=max_queue,
            stall_s=stall_s,
            replicas=engine.replicas,
            niceness=niceness,
        )
        self.instance = Instance(process, self.name, engine.config.generation)
        process.start()
        try:
            await process.wait_until_settled()
        except asyncio.CancelledError:
            await self._unload()
            raise
        if process.state == "ready":
            return None
        self._failed = process.state == "failed"
        self.reason = process.failure if self._failed else "it was unloaded while it was loading"
        await self._unload()
        return self.reason

    async def drain(self, timeout: float) -> None:
        """Take no more requests, let the running ones finish for at most `timeout` seconds, and stop the engine."""
        if self.instance is None:
            return
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                while self.instance.uses or self.instance.engine.pending.choices:
                    await asyncio.sleep(0.02)  # a callback in every finished call would cost more
        except TimeoutError:
            self.instance.engine.fail_calls()
        await self._unload()

    async def stop(self) -> None:
        """Stop the engine at once."""
        if self.instance is not None:
            await self._unload()

    async def _unload(self) -> None:
        instance, self.share = self.instance, 0.0
        if instance is not None:
            await instance.engine.stop()
        self.instance, self._draining = None, False


class ShadowCalls:
    """The copies that run, and the counts of those that ended: ok, error, or dropped because the queue was full."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._credit = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, instance: Instance, body: HasJob, share: float) -> None:
        """Send a copy of every 1/share-th request. The copy is tokenized after the request itself was submitted."""
        self._credit += share
        if self._credit < 1:
            return
        self._credit -= 1
        task = asyncio.create_task(self._run(instance, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, instance: Instance, body: HasJob) -> None:
        engine = instance.engine
        try:
            with instance.in_use() as ready:
                job = await asyncio.to_thread(body.to_job, ready)
                call = engine.submit(job.requests)
        except BaguError as error:  # the version is not ready, its queue is full, or it refuses the request
            self.counts["dropped" if getattr(error, "status", 400) in (429, 503) else "error"] += 1
            return
        try:
            while await call.read():
                pass
            self.counts["ok"] += 1
        except BaguError:
            self.counts["error"] += 1
        finally:
            engine.close(call)
