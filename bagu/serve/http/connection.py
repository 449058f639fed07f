"""uvicorn's server and its connections, with four things that it leaves open.

a request that never ends   its head is due `request_timeout` seconds after the connection or its first byte, and in
                            64 KiB; the body has the same time and a least rate (edge.read_body)
an answer before the end    of a request is not lost: the connection is closed after the client could read it
                            (`LingeringTransport`)
a client of HTTP/1.0        knows no chunks: a stream ends with its connection
the end of a shutdown       calls that still run are failed (`on_deadline`) before uvicorn cancels their tasks
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from bagu.serve.http.responses import to_json
from bagu.serve.http.tickets import ApiError

__all__ = ["HttpServer", "connection_class"]

MAX_HEAD = 64 * 2**10  # bytes of a request line and headers
LINGER_S = 2.0  # how long a client may go on sending after the answer to a request that it has not finished
LINGER_BYTES = 2**20  # and how much
Base: type[Any] = AutoHTTPProtocol  # httptools' or h11's: both have `cycle`, `transport` and `loop`


class HttpServer(uvicorn.Server):
    """Calls `on_deadline` `shutdown_timeout` seconds after a shutdown began, unless it has ended by then."""

    def __init__(self, config: uvicorn.Config, shutdown_timeout: float, on_deadline: Callable[[], None]) -> None:
        super().__init__(config)
        self._shutdown_timeout, self._on_deadline = shutdown_timeout, on_deadline

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        deadline = asyncio.get_running_loop().call_later(self._shutdown_timeout, self._on_deadline)
        try:
            await super().shutdown(sockets)
        finally:
            deadline.cancel()


def connection_class(request_timeout: float) -> type[Any]:
    """The protocol of a connection, for `uvicorn.Config(http=...)`."""
    return type("TimedConnection", (Connection,), {"request_timeout": request_timeout})


class LingeringTransport:
    """A transport whose `close` lets a client that still sends read the last answer.

    A socket that is closed with unread data, or that gets data after it was closed, sends a reset, and a reset makes
    the client's kernel drop the answer if the client has not read it yet. So while a request is incomplete, `close`
    shuts down the writing side only. What still comes is dropped until the client closes, for at most LINGER_S and
    LINGER_BYTES.
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
        self._transport.resume_reading()  # uvicorn pauses it at 64 KiB of a body that nobody has taken
        self._loop.call_later(LINGER_S, self._transport.close)

    def drop(self, data: bytes) -> None:
        self._dropped += len(data)
        if self._dropped > LINGER_BYTES:
            self._transport.close()


class Connection(Base):
    """One connection. Its timer runs while the head of a request is due, and other data does not set it back."""

    request_timeout: float
    _timer: asyncio.TimerHandle | None = None
    _received = 0  # bytes of the head that is due

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(LingeringTransport(transport, self.loop, self._is_request_incomplete))
        self._expect_head()

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
            self._forget_head()
            return
        self._expect_head()
        if self._received > MAX_HEAD and not self._answered_early:
            self._refuse(ApiError(431, f"the head of the request has more than {MAX_HEAD} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    @property
    def _answered_early(self) -> bool:
        """What comes is the rest of a body whose request has its answer: no other answer fits."""
        return self.cycle is not None and self.cycle.more_body

    def _is_request_incomplete(self) -> bool:
        return self._received > 0 or (self.cycle is not None and self.cycle.more_body)

    def _expect_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.request_timeout, self._too_late)

    def _forget_head(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._received = None, 0

    def _too_late(self) -> None:
        if self._received and not self._answered_early:
            self._refuse(ApiError(408, f"the request was not complete after {self.request_timeout:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer what is not a request yet, and close."""
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
    """Have uvicorn send no chunks to a client of HTTP/1.0 (h11 knows that itself). It wants to know a length instead:
    each piece is announced as all that is left, and after the last the connection is closed."""
    if cycle is None or cycle.scope["http_version"] != "1.0" or not hasattr(cycle, "chunked_encoding"):
        return
    send, cycle.chunked_encoding = cycle.send, False

    async def send_unchunked(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked
