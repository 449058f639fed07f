"""The engine's process as the server sees it: submit, close, ask, and its life and deaths.

Neither waits for the other: a step of 10 s delays no `/health`, and a slow client costs the engine no time. A crash, a
kernel fault or `kill -9` of the engine ends its process alone: open tickets fail with the reason, calls get 503
with it, and the process is started again.
"""

from __future__ import annotations

import asyncio
import marshal
import multiprocessing
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from bagu.serve.config import EngineConfig
from bagu.serve.http.tickets import ApiError, Ticket, Tickets
from bagu.serve.http.worker import (
    STEP,
    Abort,
    Accepted,
    Answer,
    AskStats,
    Cancel,
    Embed,
    Failed,
    Load,
    Ready,
    Refused,
    Step,
    Stop,
    Submit,
    packed,
    run,
)
from bagu.serve.request import Event, Request, TokenEvent
from bagu.serve.stats import EngineStats

__all__ = ["EngineProcess"]

SHUTTING_DOWN = "the server is shutting down"
_token_event = partial(tuple.__new__, TokenEvent)  # `_make`, without Python code around it


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
        self._wire: asyncio.WriteTransport | None = None  # to the process that lives
        self._last_words: str | None = None  # of the process, where it could still say why it ends
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._next_call = 0
        self._life: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._life = asyncio.create_task(self._live())

    def end_calls(self) -> None:
        """Fail every call that still runs, and take no more: the time for a shutdown is over."""
        if self.state == "ready":
            self.state = "stopped"
        self._fail_all(SHUTTING_DOWN, code="shutting_down")

    async def stop(self, timeout: float = 5.0) -> None:
        """Let the process end by itself, or kill it after `timeout` seconds."""
        if self.state != "failed":
            self.state = "stopped"
        self._send(Stop())
        if self._life is not None:
            await asyncio.wait({self._life}, timeout=timeout)
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    def submit(self, requests: Sequence[Request]) -> Ticket:
        self.require()
        ticket = self.tickets.open(requests)
        self._send(Submit(ticket.requests))
        return ticket

    def close(self, ticket: Ticket) -> None:
        """The call is over; what of it still runs is aborted, and its blocks are free after the step that runs now."""
        if alive := self.tickets.close(ticket):
            self._send(Abort(tuple(alive)))

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
        said = {"loading": "the model is loading", "stopped": SHUTTING_DOWN}
        message = said.get(self.state, f"the engine died ({self.why}) and is {self.state}")
        raise ApiError(503, message, code=f"engine_{self.state}", headers={"Retry-After": "1"})

    def ill(self) -> str | None:
        """Why the engine cannot be trusted with a request now; None when it is well."""
        try:
            self.require()
        except ApiError as error:
            return error.message
        age = time.perf_counter() - self.tickets.heard
        return f"the engine's last tick was {age:.1f} s ago" if age > self.stall_s else None

    async def _ask(self, message: Callable[[int], Any]) -> Any:
        self._next_call += 1
        call, future = self._next_call, asyncio.get_running_loop().create_future()
        self._calls[call] = future
        self._send(message(call))
        try:
            return await future
        except asyncio.CancelledError:
            self._send(Cancel(call))
            raise
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
            self._fail_all(f"the engine died: {reason}", code="engine_died")
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
        ours, theirs = socket.socketpair()
        process = spawn.Process(target=run, args=(theirs, self._load, self._config), name="bagu-engine", daemon=True)
        await asyncio.to_thread(process.start)
        theirs.close()
        self.pid, self.tickets.heard, self._last_words = process.pid, time.perf_counter(), None
        wire, reader = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Reader(self.tickets.deliver, self._handle), sock=ours
        )
        self._wire = wire
        if self.state == "stopped":
            self._send(Stop())
        try:
            await reader.ended
            await asyncio.to_thread(process.join, 5.0)
        finally:
            self._wire = None
            wire.abort()
            process.kill()
            process.join()
        return self._last_words or _exit_reason(process.exitcode)

    def _send(self, message: Any) -> None:
        """Nothing waits for the process to read: what does not fit into the socket lies in the transport."""
        if self._wire is not None:
            self._wire.write(packed(message))

    def _handle(self, message: Any) -> None:
        if isinstance(message, Step):
            self.tickets.deliver(*message)
        elif isinstance(message, Accepted):
            self.tickets.accept(message.request_id)
        elif isinstance(message, Answer):
            if (future := self._calls.get(message.call)) is not None and not future.done():
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(ApiError(400, message.error))
        elif isinstance(message, Refused):
            error = ApiError(400, message.message, param=message.param, hint=message.hint)
            if rest := self.tickets.fail(message.request_id, error):
                self._send(Abort(tuple(rest)))
        elif isinstance(message, Ready):
            self.ready = message
            if self.state != "stopped":
                self.state = "ready"
        elif isinstance(message, Failed):
            self._last_words = message.reason

    def _fail_all(self, message: str, *, code: str) -> None:
        def error() -> ApiError:
            return ApiError(503, message, code=code, headers={"Retry-After": "1"})

        self.tickets.fail_all(error())
        for future in self._calls.values():
            if not future.done():
                future.set_exception(error())


class _Reader(asyncio.Protocol):
    """Messages from the bytes of the socket, as they come: 4 bytes of length, then the content.

    The step that only brought tokens goes to the tickets from here. It finds the caches cold, where every function of
    Python on its way costs 2 to 4 µs; there are ten from here to the socket.
    """

    def __init__(
        self, deliver: Callable[[list[Event], Sequence[tuple[float, float]]], None], handle: Callable[[Any], None]
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deliver, self._handle = deliver, handle
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        data, at = self._rest + data if self._rest else data, 0
        while len(data) >= at + 4 and len(data) >= (end := at + 4 + int.from_bytes(data[at : at + 4], "big")):
            if data.startswith(STEP, at + 4):
                events, first_tokens = marshal.loads(data[at + 5 : end])
                self._deliver(list(map(_token_event, events)), first_tokens)
            else:
                self._handle(pickle.loads(data[at + 4 : end]))
            at = end
        self._rest = data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {signal.Signals(-code).name}"
    return f"exit status {code}"
