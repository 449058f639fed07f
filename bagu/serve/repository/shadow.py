"""Shadow traffic: copies of requests to another version. Their answers are dropped, and nobody waits for them."""

from __future__ import annotations

import asyncio
from collections import Counter

from bagu.errors import BaguError
from bagu.serve.http.instances import HasJob, Instance


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
