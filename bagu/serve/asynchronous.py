"""The engine for asyncio: any number of tasks generate at once, and one of them at a time drives the steps.

Steps run in a thread, so that the event loop goes on. What tasks ask for is applied between steps: the engine itself
is never touched by two threads.
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
    """`stream` and `generate` of an engine that nobody else steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self._mail: dict[str, asyncio.Queue[Event | BaseException]] = {}
        self._asked: list[Callable[[], object]] = []  # done between steps
        self._driver: asyncio.Task[None] | None = None

    async def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        """All choices of all prompts, prompt by prompt."""
        found = await asyncio.gather(*(self._whole(p, i, sampling) for i, p in enumerate(prompts)))
        return [choice for each in found for choice in each]

    async def stream(self, prompt: Sequence[int], sampling: Sampling) -> AsyncGenerator[Completion, None]:
        """What each token adds. A task that stops listening, or is cancelled, aborts its request."""
        request = Request(
            id=f"async-{next(self._ids)}", prompt=tuple(prompt), sampling=sampling, arrival=time.monotonic()
        )
        grown, left = choices(request, 0, self.engine.tokenizer), sampling.n
        mail = self._mail[request.id] = asyncio.Queue()
        self._ask(lambda: self._submit(request))
        try:
            while left:
                event = await mail.get()
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, TokenEvent):
                    left -= event.finish is not None
                    yield grown[event.index].push(event)
        finally:
            del self._mail[request.id]
            if left:
                self._ask(lambda: self.engine.abort(request.id))

    async def _whole(self, prompt: Sequence[int], number: int, sampling: Sampling) -> list[Completion]:
        pieces: list[list[Completion]] = [[] for _ in range(sampling.n)]
        async with contextlib.aclosing(self.stream(prompt, sampling)) as stream:
            async for piece in stream:
                pieces[piece.choice].append(piece)
        return [join(p, number) for p in pieces]

    def _submit(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except Exception as error:  # of this request alone: whoever asked is told, if still there
            if (mail := self._mail.get(request.id)) is not None:
                mail.put_nowait(error)

    def _ask(self, what: Callable[[], object]) -> None:
        self._asked.append(what)
        if self._driver is None or self._driver.done():
            self._driver = asyncio.create_task(self._drive())

    async def _drive(self) -> None:
        """Step while there is work. A step that fails ends every stream with its error."""
        try:
            while self._asked or self.engine.has_work:
                asked, self._asked = self._asked, []
                for what in asked:
                    what()
                for event in await asyncio.to_thread(self.engine.step):
                    if event.request_id in self._mail:
                        self._mail[event.request_id].put_nowait(event)
        except BaseException as error:
            for mail in self._mail.values():
                mail.put_nowait(error)
            raise
