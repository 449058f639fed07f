"""uvicorn's server and connections, with four additions.

incomplete requests   the head must arrive within `request_timeout` seconds and 64 KiB; the body has the same time plus
                      a minimum rate (calls.read_body)
early responses       a response before the end of a request is not lost: the connection stays open until the client
                      could read it (`LingeringTransport`)
HTTP/1.0 clients      a stream is sent without chunked encoding and ends with the connection
shutdown              calls that still run are failed (`on_deadline`) before uvicorn cancels their tasks
"""

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from bagu.serve.http.errors import ApiError
from bagu.serve.http.instances import Models
from bagu.serve.http.responses import to_json

MAX_HEAD = 64 * 2**10  # bytes of a request line and headers
LINGER_S = 2.0  # how long a client may keep sending after the response to its incomplete request
LINGER_BYTES = 2**20  # and how many bytes
READY_S = 0.05  # how often the engine is asked whether it is ready
Base: type[Any] = AutoHTTPProtocol  # of httptools or h11: both have `cycle`, `transport` and `loop`


class HttpServer(uvicorn.Server):
    """The server of some models: calls `when_ready` when they answer, and fails their calls `shutdown_timeout` seconds
    after a shutdown begins."""

    def __init__(self, config: uvicorn.Config, shutdown_timeout: float, models: Models) -> None:
        super().__init__(config)
        self._shutdown_timeout, self._models = shutdown_timeout, models
        self._waiting: asyncio.Task[None] | None = None
        self.when_ready: Callable[[], None] = lambda: None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._waiting = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        while self._models.unhealthy_reason() is not None:
            await asyncio.sleep(READY_S)
        self.when_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._models.begin_shutdown()
        deadline = asyncio.get_running_loop().call_later(self._shutdown_timeout, self._models.fail_calls)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()


def connection_class(request_timeout: float) -> type[Any]:
    """The protocol class for `uvicorn.Config(http=...)`."""
    return type("TimedConnection", (Connection,), {"request_timeout": request_timeout})


class LingeringTransport:
    """A transport whose `close` gives a client that is still sending time to read the last response.

    A socket that is closed with unread data, or receives data after it was closed, sends a reset, and a reset makes the
    client's kernel drop a response that the client has not read yet. So while a request is incomplete, `close` shuts
    down only the writing side. Further data is dropped until the client closes, for at most LINGER_S and LINGER_BYTES.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, is_request_incomplete: Callable[[], bool]
    ) -> None:
        self._transport, self._loop, self._is_request_incomplete = transport, loop, is_request_incomplete
        self._dropped = 0
        self.lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self.lingering or self._transport.is_closing()

    def close(self) -> None:
        if self.is_closing() or not (self._is_request_incomplete() and self._transport.can_write_eof()):
            self._transport.close()
            return
        self.lingering = True
        self._transport.write_eof()
        self._transport.resume_reading()  # uvicorn pauses it at 64 KiB of unread body
        self._loop.call_later(LINGER_S, self._transport.close)

    def drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > LINGER_BYTES:
            self._transport.close()


class Connection(Base):
    """One connection. The timer runs while the head of a request is incomplete; further bytes do not restart it."""

    request_timeout: float
    _timer: asyncio.TimerHandle | None = None
    _received = 0  # bytes of the incomplete head

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(LingeringTransport(transport, self.loop, self._is_request_incomplete))
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.lingering:
            self.transport.drop(data)
            return
        before = self.cycle
        self._received += len(data)
        super().data_received(data)
        if self.cycle is not before:
            _end_by_close(self.cycle)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
            return
        self._start_timer()
        if self._received > MAX_HEAD and not self._answered_early:
            self._refuse(ApiError(431, f"the head of the request has more than {MAX_HEAD} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    @property
    def _answered_early(self) -> bool:
        """Whether the data is the rest of a body whose request is already answered, so that no error can be sent."""
        return self.cycle is not None and self.cycle.more_body

    def _is_request_incomplete(self) -> bool:
        return self._received > 0 or (self.cycle is not None and self.cycle.more_body)

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.request_timeout, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._received = None, 0

    def _on_timeout(self) -> None:
        if self._received and not self._answered_early:
            self._refuse(ApiError(408, f"the request was not complete after {self.request_timeout:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Send an error for an incomplete request, and close."""
        if self.transport.is_closing():
            return
        body = to_json(error.body).encode()
        status = HTTPStatus(error.status)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _end_by_close(cycle: Any) -> None:
    """Turn off chunked encoding for an HTTP/1.0 client (h11 does this itself). uvicorn then checks the content length:
    it is set to the length of every piece, and the connection closes after the last one."""
    if cycle is None or cycle.scope["http_version"] != "1.0" or not hasattr(cycle, "chunked_encoding"):
        return
    send, cycle.chunked_encoding = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked
