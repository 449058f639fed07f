"""The engine for asyncio: any number of tasks generate at the same time, and one background task runs the steps.

Steps run in a thread, so the event loop is not blocked. Submits and aborts are applied between steps, so only one
thread at a time uses the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from bagu.serve.completion import choices, join
from bagu.serve.engine import Engine
from bagu.serve.request import Event, Request, Sampling, TokenEvent
from bagu.types import Completion

__all__ = ["AsyncEngine"]


class AsyncEngine:
    """Async `stream` and `generate`. No other code may call the engine's `step`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self._queues: dict[str, asyncio.Queue[Event | BaseException]] = {}  # by request id
        self._calls: list[Callable[[], object]] = []  # submits and aborts to apply before the next step
        self._stepper: asyncio.Task[None] | None = None

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """All choices of all prompts, in the order of the prompts."""
        found = await asyncio.gather(*(self._complete(p, i, sampling) for i, p in enumerate(prompts)))
        return [choice for each in found for choice in each]

    async def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """Yield the tokens and text of every event. Closing the generator or cancelling the task aborts the request."""
        request = Request(
            id=f"async-{next(self._ids)}", prompt=tuple(prompt), sampling=sampling, arrival=time.monotonic()
        )
        grown, left = choices(request, 0, self.engine.tokenizer), sampling.n
        queue = self._queues[request.id] = asyncio.Queue()
        self._call_before_step(lambda: self._submit(request))
        try:
            while left:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, TokenEvent):
                    left -= event.finish is not None
                    yield grown[event.index].push(event)
        finally:
            del self._queues[request.id]
            if left:
                self._call_before_step(lambda: self.engine.abort(request.id))

    async def _complete(self, prompt: Sequence[int], number: int, sampling: Sampling) -> list[Completion]:
        pieces: list[list[Completion]] = [[] for _ in range(sampling.n)]
        async with contextlib.aclosing(self.stream(prompt, sampling)) as stream:
            async for piece in stream:
                pieces[piece.choice].append(piece)
        return [join(p, number) for p in pieces]

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:  # only this request fails; its stream raises the error if it is still open
            if (queue := self._queues.get(request.id)) is not None:
                queue.put_nowait(error)

    def _call_before_step(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._run_steps())

    async def _run_steps(self) -> None:
        """Step while there is work. If a step fails, every open stream raises its error."""
        try:
            while self._calls or self.engine.has_work:
                calls, self._calls = self._calls, []
                for call in calls:
                    call()
                for event in await asyncio.to_thread(self.engine.step):
                    if event.request_id in self._queues:
                        self._queues[event.request_id].put_nowait(event)
        except BaseException as error:
            for queue in self._queues.values():
                queue.put_nowait(error)
            raise
