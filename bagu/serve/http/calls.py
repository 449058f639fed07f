"""Around the routes: bodies with a limit, keys, counts, streams, and clients that hang up.

While a call waits, `Call` listens for the end of its connection, and then takes the ticket out of the engine at once:
its blocks are free after the step that runs. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import types
from collections.abc import Coroutine, Generator, Mapping, Sequence
from typing import Any, TypeVar

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bagu.serve.http.metrics import Metrics
from bagu.serve.http.process import EngineProcess
from bagu.serve.http.responses import Reply, error_event, to_json
from bagu.serve.http.tickets import ApiError, Ticket
from bagu.serve.request import Request as EngineRequest

__all__ = ["Call", "Edge", "EventStream", "read_json", "reply_error", "reply_json", "unless_gone"]

MAX_BODY = 8 * 2**20  # bytes; a prompt of 1M tokens is about 4 MB
MIN_RATE = 16 * 2**10  # bytes a second of a body that is slow to come
GUARDED = ("/v1", "/tokenize", "/detokenize")  # what needs the API key begins with one of them
SEND = "bagu.send"  # in the scope: the server's `send`, without the middlewares around it
T = TypeVar("T")
STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Call:
    """A ticket, and a listener that gives it back when the client hangs up."""

    def __init__(self, engine: EngineProcess, requests: tuple[EngineRequest, ...], receive: Receive) -> None:
        self.ticket: Ticket = engine.submit(requests)
        self._engine = engine
        self._watcher = asyncio.create_task(self._watch(receive))

    def close(self) -> None:
        self._watcher.cancel()
        self._engine.close(self.ticket)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._engine.close(self.ticket)
        self.ticket.fail(ApiError(499, "the client hung up"))


async def unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What `work` returns; it is cancelled when the client hangs up."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise ApiError(499, "the client hung up")
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


class EventStream(Response):
    """A reply as server-sent events; each `send` carries all that is there.

    A token is written in the callback that brought it from the engine, with no future, no task and no turn of the event
    loop between the two. Only where the client reads too slowly does a task wait for it, and what comes meanwhile lies
    in the mailbox. Messages go to the server's `send` itself: what lies before it is for the beginning of a reply.
    """

    def __init__(self, reply: Reply, call: Call) -> None:
        super().__init__(headers=STREAM)
        del self.headers["content-length"]  # nobody knows it yet
        self.reply, self.call = reply, call
        self._blocked: asyncio.Task[None] | None = None  # waits for the client
        self._last: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = scope[SEND]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if opening := self.reply.opening():
                await self._send({"type": "http.response.body", "body": opening, "more_body": True})
            self.call.ticket.listen(self._write)
            self._write()
            await self._send({"type": "http.response.body", "body": await self._last})
        finally:
            self.call.close()

    def _write(self) -> None:
        """Send what is there, and see whether it is the end."""
        ticket = self.call.ticket
        if self._blocked is not None or self._last.done():
            return
        try:
            events, ticket.mail = ticket.mail, []
            if data := self.reply.chunks(events):
                sending = self._send({"type": "http.response.body", "body": data, "more_body": True})
                try:
                    waits_for = sending.send(None)  # runs to its end, unless the client is slow
                except StopIteration:
                    pass
                else:
                    self._blocked = asyncio.create_task(go_on(sending, waits_for))
                    self._blocked.add_done_callback(self._unblocked)
                    return
            if ticket.failure is not None:
                raise ticket.failure
            if not ticket.clocks:
                self._last.set_result(self.reply.closing())
        except ApiError as error:  # the status is sent: the error is an event
            self._last.set_result(error_event(error))
        except Exception as error:  # a fault of the server: raised where the reply is awaited
            self._last.set_exception(error)

    def _unblocked(self, task: asyncio.Task[None]) -> None:
        self._blocked = None
        if task.cancelled() or self._last.done():  # the call is over
            return
        if (error := task.exception()) is not None:
            self._last.set_exception(error)
        self._write()


async def go_on(coroutine: Coroutine[Any, None, None], waits_for: Any) -> None:
    """The rest of a coroutine that was begun, and waits for something."""

    @types.coroutine
    def rest() -> Generator[Any, None, None]:
        yield waits_for
        yield from coroutine.__await__()

    await rest()


class Edge:
    """Around every route: the key, the request's id, the count, the origins whose pages may read an answer, and no
    error that is not in OpenAI's shape."""

    def __init__(self, app: ASGIApp, metrics: Metrics, *, api_key: str | None, allowed_origins: Sequence[str]) -> None:
        self.app, self.metrics = app, metrics
        self.digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()
        self.checked: ASGIApp = self._checked
        if allowed_origins:  # around the check of the key: a page is to read that its key is wrong
            self.checked = CORSMiddleware(
                self._checked, allow_origins=allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[SEND] = send
        id = dict(scope["headers"]).get(b"x-request-id", b"")[:128]
        status, began = 500, False

        async def count(message: Message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status, began = message["status"], True
                if id:
                    message["headers"] = [*message["headers"], (b"x-request-id", id)]
            await send(message)

        try:
            await self.checked(scope, receive, count)
        except asyncio.CancelledError:  # the last moment of a shutdown, e.g. of a client that does not read
            if not began:
                await reply_error(ApiError(503, "the server is shutting down"))(scope, receive, count)
        finally:
            route = scope.get("route")
            self.metrics.http[getattr(route, "path", "unmatched"), scope["method"], status] += 1

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._allowed(scope):
            await self.app(scope, receive, send)
        else:
            error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
            await reply_error(error)(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if self.digest is None or not scope["path"].startswith(GUARDED) or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()  # of equal length, so that the comparison tells nothing
        return secrets.compare_digest(digest, self.digest) and scheme.lower() == b"bearer"


async def read_json(request: Request, timeout: float) -> bytes:
    """The body of a request that says it is JSON, else 415: a page of another origin can send any other type without
    asking first."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        hint = "send the header Content-Type: application/json"
        raise ApiError(415, f"the body's content type is {kind[:80] or 'missing'}", hint=hint)
    return await read_body(request, timeout)


async def read_body(request: Request, timeout: float) -> bytes:
    """The body, 408 where it takes more than `timeout` seconds beside a second for every MIN_RATE bytes, or 413. What
    is too much is read and dropped, for a client that sends before it listens."""
    parts, size = [], 0
    due = asyncio.get_running_loop().time() + timeout
    try:
        async with asyncio.timeout_at(due) as limit:
            async for part in request.stream():
                size += len(part)
                limit.reschedule(due + size / MIN_RATE)
                if size <= MAX_BODY:
                    parts.append(part)
                elif size > 8 * MAX_BODY:
                    break
    except ClientDisconnect as error:
        raise ApiError(499, "the client hung up within its body") from error
    except TimeoutError as error:
        found = f"the body was not complete after {timeout:g} s and {size} bytes"
        raise ApiError(408, found, headers={"connection": "close"}) from error
    if size > MAX_BODY:
        raise ApiError(413, f"the body has more than {MAX_BODY} bytes", headers={"connection": "close"})
    return b"".join(parts)


def reply_json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(data), status, headers, media_type="application/json")


def reply_error(error: ApiError) -> Response:
    return reply_json(error.body, error.status, error.headers)
