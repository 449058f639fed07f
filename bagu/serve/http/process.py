"""The HTTP server's interface to the engine process: submit and close calls, read statistics, restart it after a crash.

Neither process blocks the other: `/health` answers during a step of 10 s, and a slow client does not slow the engine. A
crash, a kernel fault or `kill -9` ends the engine process only: pending calls fail with the reason, new calls get 503
with it, and the process is started again.
"""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from bagu.errors import BaguError
from bagu.serve.adapters.info import AdapterInfo
from bagu.serve.config import EngineConfig
from bagu.serve.http.errors import ApiError
from bagu.serve.http.launch import EngineStart, Launch, LaunchedEngine, LocalEngine
from bagu.serve.http.pending import PendingCall, PendingCalls
from bagu.serve.request import Request
from bagu.serve.stats import EngineStats
from bagu.serve.wire.encode import MessageReader, framed
from bagu.serve.wire.messages import (
    Abort,
    Accepted,
    Adapters,
    Cancel,
    Embed,
    Failed,
    GetStats,
    Load,
    LoadAdapter,
    Ready,
    Refused,
    Result,
    StepEvents,
    Stop,
    Submit,
    UnloadAdapter,
    Warming,
)

SHUTTING_DOWN = "the server is shutting down"


class EngineProcess:
    """Starts and supervises the engine process. All methods are called from the event loop.

    `state` is "loading", then "warming" and "ready"; "restarting" after a crash; "stopped" at shutdown. It is "failed"
    if the engine never became ready; then `on_failure` was called. `failure` is the reason of the last crash. The first
    process loads with this `niceness`, for the engines that serve meanwhile. `on_message` gets every message but those
    with tokens, after it was handled. `launch` starts the process.
    """

    def __init__(
        self, load: Load, config: EngineConfig, pending: PendingCalls, *, stall_s: float = 60.0,
        on_failure: Callable[[], None] = lambda: None, load_draft: Load | None = None, niceness: int = 0,
        on_message: Callable[[Any], None] = lambda message: None, launch: Launch = LocalEngine,
    ) -> None:  # fmt: skip
        self.pending, self.stall_s = pending, stall_s
        self.state: Literal["loading", "warming", "ready", "restarting", "failed", "stopped"] = "loading"
        self.failure = ""
        self.ready: Ready | None = None
        self.adapters: Mapping[str, AdapterInfo] = {}  # loaded now; after a crash those of the start
        self.pid: int | None = None
        self._load, self._load_draft, self._config, self._on_failure = load, load_draft, config, on_failure
        self._niceness, self._on_message, self._launch = niceness, on_message, launch
        self._process: LaunchedEngine | None = None
        self._settled = asyncio.Event()  # the first start has ended: "ready", "failed" or "stopped"
        self._transport: asyncio.WriteTransport | None = None  # to the running process
        self._reported: str | None = None  # the error that the process sent before it ended
        self._results: dict[int, asyncio.Future[Any]] = {}  # by the number of the call
        self._next_call = 0
        self._supervisor: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    def fail_calls(self) -> None:
        """Fail all running calls and refuse new ones: the shutdown timeout is over."""
        if self.state == "ready":
            self.state = "stopped"
        self._fail_all(SHUTTING_DOWN, code="shutting_down")

    async def stop(self, timeout: float = 5.0) -> None:
        """Ask the process to end; kill it after `timeout` seconds, or at once while it loads."""
        if self.state in ("loading", "warming"):
            timeout = 0.0
        if self.state != "failed":
            self.state = "stopped"
        self._settled.set()
        self.send(Stop())
        if self._supervisor is not None:
            await asyncio.wait({self._supervisor}, timeout=timeout)
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)

    async def wait_until_settled(self) -> None:
        """Wait until the first start has ended: `state` is then "ready", "failed" or "stopped"."""
        await self._settled.wait()

    def submit(self, requests: Sequence[Request]) -> PendingCall:
        self.require_ready()
        call = self.pending.open(requests)
        self.send(Submit(call.requests))
        return call

    def close(self, call: PendingCall) -> None:
        """End a call. Its unfinished requests are aborted; their blocks are free after the current step."""
        if unfinished := self.pending.close(call):
            self.send(Abort(tuple(unfinished)))

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        self.require_ready()
        return await self._call(lambda number: Embed(number, tuple(map(tuple, texts))))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter. Raises ApiError if it cannot be served; the others go on."""
        self.require_ready()
        await self._call(lambda number: LoadAdapter(number, name, path))

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter's name away; the requests that use it finish."""
        self.require_ready()
        await self._call(lambda number: UnloadAdapter(number, name))

    async def stats(self) -> EngineStats | None:
        """The engine's statistics; None if no engine is running or it does not answer within 1 s."""
        if self.state != "ready":
            return None
        try:
            return await asyncio.wait_for(self._call(GetStats), 1.0)
        except (TimeoutError, ApiError):
            return None

    def require_ready(self) -> Ready:
        """The properties of the running engine. Raises 503 with the reason if it is not ready."""
        if self.state == "ready" and self.ready is not None:
            return self.ready
        messages = {"loading": "the model is loading", "warming": "the model is warming up", "stopped": SHUTTING_DOWN}
        message = messages.get(self.state, f"the engine died ({self.failure}) and is {self.state}")
        raise ApiError(503, message, code=f"engine_{self.state}", headers={"Retry-After": "1"})

    def unhealthy_reason(self) -> str | None:
        """Why the engine cannot serve requests now; None if it is healthy."""
        try:
            self.require_ready()
        except ApiError as error:
            return error.message
        age = time.perf_counter() - self.pending.last_message
        return f"the engine's last step was {age:.1f} s ago" if age > self.stall_s else None

    def describe(self) -> list[dict[str, Any]]:
        """The replicas: none."""
        return []

    async def _call(self, message: Callable[[int], Any]) -> Any:
        """Send `message(number)` and wait for the `Result` of this number."""
        self._next_call += 1
        call, future = self._next_call, asyncio.get_running_loop().create_future()
        self._results[call] = future
        self.send(message(call))
        try:
            return await future
        except asyncio.CancelledError:
            self.send(Cancel(call))
            raise
        finally:
            self._results.pop(call, None)

    async def _supervise(self) -> None:
        """Start the process, and restart it 0, 1, 2, 4 ... 30 s after it dies."""
        pause = 0.0
        while True:
            reason = await self._run_process()
            if self.state == "stopped":
                return
            self.failure, was_ready, first = reason, self.state == "ready", self.state in ("loading", "warming")
            self.state = "failed" if first else "restarting"
            self._fail_all(f"the engine died: {reason}", code="engine_died")
            if first:  # whoever started it reports why
                self._settled.set()
                self._on_failure()
                return
            print(f"bagu serve: the engine process ended: {reason}", file=sys.stderr, flush=True)
            pause = 0.0 if was_ready else min(max(2 * pause, 1.0), 30.0)
            await asyncio.sleep(pause)
            self.pending.metrics.engine_restarts += 1

    async def _run_process(self) -> str:
        """Run one engine process until it ends; returns the reason."""
        niceness = self._niceness if self.state == "loading" else 0
        start = EngineStart(self._load, self._config, self._load_draft, niceness)
        try:
            process = await asyncio.to_thread(self._launch, start, lambda: self.state == "stopped")
        except BaguError as error:
            return f"{error} ({error.hint})"
        self.pid, self.pending.last_message, self._reported = process.pid, time.perf_counter(), None
        loop, sock = asyncio.get_running_loop(), process.connection
        connect: Any = loop.create_unix_connection if sock.family == socket.AF_UNIX else loop.create_connection
        transport, reader = await connect(lambda: MessageReader(self.pending.deliver, self._handle), sock=sock)
        self._transport, self._process = transport, process
        if self.state == "stopped":
            self.send(Stop())
        try:
            await reader.ended
            await asyncio.to_thread(process.join, 5.0)
        finally:
            self._transport = self._process = None
            transport.abort()
            process.kill()
            await asyncio.to_thread(process.join, 60.0)  # a GPU's memory may take seconds to be free
        return self._reported or _exit_reason(process.exit_code)

    def kill(self, reason: str) -> None:
        """End a process that does not answer; it is started again, as after a crash."""
        if self._process is not None:
            self._reported = reason
            self._process.kill()

    def send(self, message: Any) -> None:
        """Does not wait for the process to read: the transport buffers the rest if the socket is full. If the process
        has just died, nothing is sent (uvloop raises then): what waits for an answer fails when its end is handled."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(message))

    def _handle(self, message: Any) -> None:
        if isinstance(message, StepEvents):
            self.pending.deliver(*message)
        elif isinstance(message, Accepted):
            self.pending.accept(message.request_id)
        elif isinstance(message, Result):
            if (future := self._results.get(message.call)) is not None and not future.done():
                if message.error is None:
                    future.set_result(message.value)
                else:
                    future.set_exception(ApiError(message.status, message.error))
        elif isinstance(message, Refused):
            # an adapter that was unloaded after the server had looked it up; the hint names adapters of other keys
            gone = message.param == "model"
            error = ApiError(
                404 if gone else message.status,
                message.message,
                param=message.param,
                hint="" if gone else message.hint,
                code="model_not_found" if gone else None,
            )
            if others := self.pending.fail(message.request_id, error):
                self.send(Abort(tuple(others)))
        elif isinstance(message, Ready):
            self.pending.last_message = time.perf_counter()  # loading may have taken longer than a stall
            self.ready, self.adapters = message, _by_name(message.adapters)
            if self.state != "stopped":
                self.state = "ready"
            self._settled.set()
        elif isinstance(message, Adapters):
            self.adapters = _by_name(message.infos)
        elif isinstance(message, Warming):
            if self.state == "loading":
                self.state = "warming"
        elif isinstance(message, Failed):
            self._reported = message.reason
        self._on_message(message)

    def _fail_all(self, message: str, *, code: str) -> None:
        def error() -> ApiError:
            return ApiError(503, message, code=code, headers={"Retry-After": "1"})

        self.pending.fail_all(error())
        for future in self._results.values():
            if not future.done():
                future.set_exception(error())


def _by_name(infos: Sequence[AdapterInfo]) -> dict[str, AdapterInfo]:
    return {info.name: info for info in infos}


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by signal {signal.Signals(-code).name}"
    return f"exit status {code}"
