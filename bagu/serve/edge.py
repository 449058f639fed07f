"""Around the routes: bodies with a limit, keys, counts, streams, and clients that hang up.

While a call waits, `Call` listens for the end of its connection, and then takes the ticket out of the engine at once:
its blocks are free after the step that runs. Nothing is polled.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bagu.serve.metrics import Metrics
from bagu.serve.process import EngineProcess
from bagu.serve.replies import Reply, error_event, to_json
from bagu.serve.request import Request as EngineRequest
from bagu.serve.tickets import ApiError, Ticket

__all__ = ["Call", "Edge", "EventStream", "read_body", "reply_error", "reply_json"]

MAX_BODY = 8 * 2**20  # bytes; a prompt of 1M tokens is about 4 MB
SEND = "bagu.send"  # in the scope: the server's `send`, without the middlewares around it
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


class EventStream(Response):
    """A reply as server-sent events; each `send` carries all that is there.

    What is done for every token is done in `_pump`, a task of its own: the task that called goes through a dozen
    coroutines of the framework, and each of them would be resumed at each token. For the same reason its messages go to
    the server's `send` itself: what lies before it is for the beginning of a reply.
    """

    def __init__(self, reply: Reply, call: Call) -> None:
        super().__init__(headers=STREAM)
        del self.headers["content-length"]  # nobody knows it yet
        self.reply, self.call = reply, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await asyncio.create_task(self._pump(scope[SEND]))
        finally:
            self.call.close()

    async def _pump(self, send: Send) -> None:
        ticket, data = self.call.ticket, self.reply.opening()
        try:
            while True:
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if not ticket.mail and not ticket.ended:
                    await ticket.woken()
                events = ticket.take()
                if not events and ticket.ended:
                    break
                data = self.reply.chunks(events)
            data = self.reply.closing()
        except ApiError as error:  # the status is sent: the error is an event
            data = error_event(error)
        await send({"type": "http.response.body", "body": data})


class Edge:
    """Around every route: the key, the request's id, the count, and no error that is not in OpenAI's shape."""

    def __init__(self, app: ASGIApp, metrics: Metrics, api_key: str | None) -> None:
        self.app, self.metrics = app, metrics
        self.digest = None if api_key is None else hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        scope[SEND] = send
        headers = dict(scope["headers"])
        id = headers.get(b"x-request-id", b"")[:128]
        status = 500

        async def count(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if id:
                    message["headers"] = [*message["headers"], (b"x-request-id", id)]
            await send(message)

        try:
            if self._allowed(scope, headers):
                await self.app(scope, receive, count)
            else:
                error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
                await reply_error(error)(scope, receive, count)
        finally:
            route = scope.get("route")
            self.metrics.http[getattr(route, "path", "unmatched"), scope["method"], status] += 1

    def _allowed(self, scope: Scope, headers: Mapping[bytes, bytes]) -> bool:
        if self.digest is None or not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS":
            return True
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()  # of equal length, so that the comparison tells nothing
        return secrets.compare_digest(digest, self.digest) and scheme.lower() == b"bearer"


async def read_body(request: Request) -> bytes:
    """The body, or 413. What is too much is read and dropped, for a client that sends before it listens."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY:
            parts.append(part)
        elif size > 8 * MAX_BODY:
            break
    if size > MAX_BODY:
        raise ApiError(413, f"the body has more than {MAX_BODY} bytes", headers={"connection": "close"})
    return b"".join(parts)


def reply_json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(data), status, headers, media_type="application/json")


def reply_error(error: ApiError) -> Response:
    return reply_json(error.body, error.status, error.headers)
