"""The engine's process as the server sees it: submit, close, ask, and its life and deaths.

Neither waits for the other: a step of 10 s delays no `/health`, and a slow client costs the engine no time. A crash, a
kernel fault or `kill -9` of the engine ends its process alone: open tickets fail with the reason, calls get 503
with it, and the process is started again.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from bagu.serve.config import EngineConfig
from bagu.serve.request import Request
from bagu.serve.tickets import ApiError, Ticket, Tickets
from bagu.serve.worker import (
    Abort,
    Accepted,
    Answer,
    AskStats,
    Embed,
    Failed,
    Load,
    Ready,
    Refused,
    Step,
    Stop,
    Submit,
    receive,
    run,
    send,
)

if TYPE_CHECKING:
    from bagu.serve.engine import EngineStats

__all__ = ["EngineProcess"]


class EngineProcess:
    """The engine as the server sees it. All methods are called from the event loop.

    `state` is "loading" until the first warm-up, "ready", "restarting" after a death, or "failed": it never came up,
    and `on_failure` was called. `why` is the reason of the last death.
    """

    def __init__(
        self, load: Load, config: EngineConfig, tickets: Tickets, *, stall_s: float = 60.0,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.tickets, self.stall_s = tickets, stall_s
        self.state: Literal["loading", "ready", "restarting", "failed", "stopped"] = "loading"
        self.why = ""
        self.ready: Ready | None = None
        self.pid: int | None = None
        self._load, self._config, self._on_failure = load, config, on_failure
        self._last_tick = time.monotonic()
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._life: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._life = asyncio.create_task(self._live())

    async def stop(self, timeout: float = 5.0) -> None:
        """Let the process end by itself, or kill it after `timeout` seconds."""
        if self.state != "failed":
            self.state = "stopped"
        self._outbox.put(Stop())
        if self._life is not None:
            await asyncio.wait({self._life}, timeout=timeout)
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    def submit(self, requests: Sequence[Request]) -> Ticket:
        self.require()
        ticket = self.tickets.open(requests)
        self._outbox.put(Submit(ticket.requests))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """The call is over; what of it still runs is aborted, and its blocks are free after the step that runs now."""
        if alive := self.tickets.close(ticket):
            self._outbox.put(Abort(tuple(alive)))

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        self.require()
        return await self._ask(lambda call: Embed(call, tuple(map(tuple, texts))))

    async def stats(self) -> EngineStats | None:
        """The engine's own numbers, None while there is no engine or it does not answer within 1 s."""
        if self.state != "ready":
            return None
        try:
            return await asyncio.wait_for(self._ask(AskStats), 1.0)
        except (TimeoutError, ApiError):
            return None

    def require(self) -> Ready:
        """What is known of the running engine; 503 with the reason where there is none."""
        if self.state == "ready" and self.ready is not None:
            return self.ready
        said = {"loading": "the model is loading", "stopped": "the server is shutting down"}
        message = said.get(self.state, f"the engine died ({self.why}) and is {self.state}")
        raise ApiError(503, message, code=f"engine_{self.state}", headers={"Retry-After": "1"})

    def ill(self) -> str | None:
        """Why the engine cannot be trusted with a request now; None when it is well."""
        try:
            self.require()
        except ApiError as error:
            return error.message
        age = time.monotonic() - self._last_tick
        return f"the engine's last tick was {age:.1f} s ago" if age > self.stall_s else None

    async def _ask(self, message: Callable[[int], Any]) -> Any:
        self._next_call += 1
        call, future = self._next_call, asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._outbox.put(message(call))
        try:
            return await future
        finally:
            self._calls.pop(call, None)

    async def _live(self) -> None:
        """Start the process, and start it again whenever it dies; 0, 1, 2, 4 ... 30 s after a death."""
        pause = 0.0
        while True:
            reason = await self._one_life()
            if self.state == "stopped":
                return
            self.why, was_ready, first = reason, self.state == "ready", self.state == "loading"
            self.state = "failed" if first else "restarting"
            self._fail_all(f"the engine died: {reason}")
            print(f"bagu serve: the engine's process ended: {reason}", file=sys.stderr, flush=True)
            if first:
                self._on_failure()
                return
            pause = 0.0 if was_ready else min(max(2 * pause, 1.0), 30.0)
            await asyncio.sleep(pause)
            self.tickets.metrics.engine_restarts += 1

    async def _one_life(self) -> str:
        """Run one process to its end; returns why it ended."""
        spawn = multiprocessing.get_context("spawn")  # a forked CUDA or OpenMP state is broken
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=run, args=(theirs, self._load, self._config), name="bagu-engine", daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        self.pid, self._last_tick = process.pid, time.monotonic()
        outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox = outbox
        threading.Thread(target=_post, args=(ours, outbox), daemon=True).start()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        reason: list[str] = []
        loop.add_reader(ours.fileno(), self._receive, ours.fileno(), Frames(), reason, ended)
        try:
            await ended.wait()
            await asyncio.to_thread(process.join, 5.0)
        finally:
            loop.remove_reader(ours.fileno())
            outbox.put(None)
            process.kill()
            process.join()
        return reason[0] if reason else _exit_reason(process.exitcode)

    def _receive(self, fd: int, frames: Frames, reason: list[str], ended: asyncio.Event) -> None:
        """What the pipe holds; the event loop calls this when there is something. One read takes all of it."""
        try:
            data = os.read(fd, 1 << 18)
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(fd)
            ended.set()
            return
        self._last_tick = time.monotonic()
        for message in map(receive, frames.feed(data)):
            self._handle(message, reason)

    def _handle(self, message: Any, reason: list[str]) -> None:
        if isinstance(message, Step):
            self.tickets.deliver(message.events)
        elif isinstance(message, Accepted):
            self.tickets.accept(message.request_id)
        elif isinstance(message, Answer):
            if (future := self._calls.get(message.call)) is not None and not future.done():
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(ApiError(400, message.error))
        elif isinstance(message, Refused):
            rest = self.tickets.fail(message.request_id, ApiError(400, message.message, hint=message.hint))
            if rest:
                self._outbox.put(Abort(tuple(rest)))
        elif isinstance(message, Ready):
            self.ready = message
            if self.state != "stopped":
                self.state = "ready"
        elif isinstance(message, Failed):
            reason.append(message.reason)

    def _fail_all(self, message: str) -> None:
        def error() -> ApiError:
            return ApiError(503, message, code="engine_died", headers={"Retry-After": "1"})

        self.tickets.fail_all(error())
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error())


class Frames:
    """Messages from the bytes of `multiprocessing`'s pipe: 4 bytes of length, then the message. `Connection.recv_bytes`
    reads the two apart, a system call more a step, and blocks the event loop while a message is half there."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        data, at, found = self._rest + data, 0, []
        while len(data) >= at + 4 and len(data) >= (end := at + 4 + int.from_bytes(data[at : at + 4], "big")):
            found.append(data[at + 4 : end])
            at = end
        self._rest = data[at:]
        return found


def _post(pipe: Connection, outbox: queue.SimpleQueue[Any]) -> None:
    """Write messages from a thread: a pipe that is full holds up this thread and not the server."""
    try:
        while (message := outbox.get()) is not None:
            send(pipe, message)
    except OSError:  # the process is gone; the reader sees the end of the pipe and says so
        pass


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {signal.Signals(-code).name}"
    return f"exit status {code}"
