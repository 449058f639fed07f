"""HTTP around the routes: body limits, whose API key it is, request counts, event streams, and clients that disconnect.

While a call waits, `ClientCall` watches for its disconnect and then aborts its requests at once: their blocks are free
after the current step. Nothing is polled.
"""

import asyncio
import time
import types
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import Any, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bagu.serve.http.engine import ServedEngine
from bagu.serve.http.errors import ApiError
from bagu.serve.http.keys import Keys, KeyUse
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.observe.record import RECORD, Observer, RequestRecord
from bagu.serve.http.pending import PendingCall
from bagu.serve.http.responses import GenerationResponse, to_json
from bagu.serve.request import Request as EngineRequest

MAX_BODY = 8 * 2**20  # bytes; a prompt of 1M tokens is about 4 MB
MIN_RATE = 16 * 2**10  # bytes per second that a body must arrive with
KEY = "bagu.key"  # key in the scope: the `KeyUse` of the request, None if its key is missing or wrong
SEND = "bagu.send"  # key in the scope: the server's `send`, without the middlewares around it
T = TypeVar("T")
STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class ClientCall:
    """Requests submitted to the engine for one HTTP call, aborted when the client disconnects."""

    def __init__(
        self, engine: ServedEngine, requests: tuple[EngineRequest, ...], receive: Receive, key: KeyUse | None = None
    ) -> None:
        """`key` is charged for the tokens when the call ends."""
        self.pending: PendingCall = engine.submit(requests)
        self._engine, self._key = engine, key
        self._watcher = asyncio.create_task(self._watch(receive))

    def close(self) -> None:
        self._watcher.cancel()
        self._engine.close(self.pending)
        if self._key is not None:
            self._key.charge(self.pending.prompt_tokens + self.pending.num_tokens, time.time())
            self._key = None

    async def _watch(self, receive: Receive) -> None:
        await _disconnected(receive)
        self._engine.close(self.pending)
        self.pending.fail(ApiError(499, "the client disconnected"))


async def cancel_on_disconnect(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """Await `work`; cancel it and raise 499 if the client disconnects first."""
    tasks = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ApiError(499, "the client disconnected")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


async def _disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of a generation; each `send` carries all new events.

    A token is written in the callback that delivers it from the engine process, without a future, a task or another
    iteration of the event loop in between. Only if the client reads too slowly, a task waits for it, and new events
    collect in the pending call. Body messages go directly to the server's `send`: middlewares only need the start of
    the response.
    """

    def __init__(self, response: GenerationResponse, call: ClientCall) -> None:
        super().__init__(headers=STREAM)
        del self.headers["content-length"]  # the length is not known
        self.response, self.call = response, call
        self._blocked: asyncio.Task[None] | None = None  # waits for the client to read
        self._last_chunk: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = scope[SEND]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if first := self.response.first_chunks():
                await self._send({"type": "http.response.body", "body": first, "more_body": True})
            self.call.pending.set_callback(self._write)
            self._write()
            await self._send({"type": "http.response.body", "body": await self._last_chunk})
        finally:
            self.call.close()

    def _write(self) -> None:
        """Send the new events; set `_last_chunk` if the call has ended."""
        pending = self.call.pending
        if self._blocked is not None or self._last_chunk.done():
            return
        try:
            events, pending.events = pending.events, []
            if data := self.response.chunks(events):
                sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
                try:
                    waits_for = sending.send(None)  # runs to its end, unless the client is slow
                except StopIteration:
                    pass
                else:
                    self._blocked = asyncio.create_task(resume(sending, waits_for))
                    self._blocked.add_done_callback(self._unblocked)
                    return
            if pending.failure is not None:
                raise pending.failure
            if not pending.unfinished:
                self._last_chunk.set_result(self.response.last_chunk())
        except ApiError as error:  # the status is already sent, so the error is an event
            self._last_chunk.set_result(self.response.error_event(error))
        except Exception as error:  # a bug in the server: raised where the response is awaited
            self._last_chunk.set_exception(error)

    def _unblocked(self, task: asyncio.Task[None]) -> None:
        self._blocked = None
        if task.cancelled() or self._last_chunk.done():  # the call is over
            return
        if (error := task.exception()) is not None:
            self._last_chunk.set_exception(error)
        self._write()


async def resume(coroutine: Coroutine[Any, None, None], waits_for: Any) -> None:
    """Run the rest of a started coroutine that is suspended at `waits_for`."""

    @types.coroutine
    def rest() -> Generator[Any, None, None]:
        yield waits_for
        yield from coroutine.__await__()

    await rest()


class ApiMiddleware:
    """Around every route: finds the API key, which the route checks (api.py), applies CORS, returns the client's
    X-Request-Id or a new one, counts requests, gives the record of each to the observers, and answers 503 in OpenAI's
    shape to calls that a shutdown cancels."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        *,
        keys: Keys,
        allowed_origins: Sequence[str],
        observers: Sequence[Observer] = (),
    ) -> None:
        self.app, self.metrics, self.keys, self.observers = app, metrics, keys, observers
        if allowed_origins:
            self.app = CORSMiddleware(
                app, allow_origins=allowed_origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[SEND] = send
        record = scope[RECORD] = RequestRecord.of(scope)
        self._find_key(scope)
        status, began = 500, False

        async def count(message: Message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status, began = message["status"], True
                message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await self.app(scope, receive, count)
        except asyncio.CancelledError:  # uvicorn cancels at the end of a shutdown, e.g. a client that does not read
            if not began:
                await error_response(ApiError(503, "the server is shutting down"))(scope, receive, count)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            self.metrics.http[route, scope["method"], status, record.version_label] += 1
            record.end(route, status)
            for observe in self.observers:
                observe(record)

    def _find_key(self, scope: Scope) -> None:
        if not self.keys:
            return
        found = scope[KEY] = self.keys.find(dict(scope["headers"]).get(b"authorization", b""))
        if found is not None:
            scope[RECORD].key_name = found.key.name


async def read_json(request: Request, timeout: float) -> bytes:
    """The body of a request with the content type application/json; raises 415 for others. A page of another origin can
    send the simple content types without a CORS preflight request."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        hint = "send the header Content-Type: application/json"
        raise ApiError(415, f"the body's content type is {kind[:80] or 'missing'}", hint=hint)
    return await read_body(request, timeout)


async def read_body(request: Request, timeout: float, most: int = MAX_BODY) -> bytes:
    """The body. Raises 408 if it takes more than `timeout` seconds plus one second per MIN_RATE bytes, and 413 if it is
    too large. Excess bytes are read and dropped, since many clients send the whole body before they read."""
    parts, size = [], 0
    due = asyncio.get_running_loop().time() + timeout
    try:
        async with asyncio.timeout_at(due) as limit:
            async for part in request.stream():
                size += len(part)
                limit.reschedule(due + size / MIN_RATE)
                if size <= most:
                    parts.append(part)
                elif size > 8 * most:
                    break
    except ClientDisconnect as error:
        raise ApiError(499, "the client disconnected while it sent the body") from error
    except TimeoutError as error:
        found = f"the body was not complete after {timeout:g} s and {size} bytes"
        raise ApiError(408, found, headers={"connection": "close"}) from error
    if size > most:
        raise ApiError(413, f"the body has more than {most} bytes", headers={"connection": "close"})
    return b"".join(parts)


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(data), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body, error.status, error.headers)
