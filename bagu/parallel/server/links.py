"""Sockets: a link between two processes that carries messages in order, and a listener for links.

A link has one thread that reads and one that writes, so that two processes that send each other large arrays do not
wait for each other. The first message of a link is `hello` with the token of the run; others are closed.
"""

import contextlib
import hmac
import queue
import socket
import threading
from collections.abc import Callable

import numpy as np

from bagu.parallel.server.wire import PREFIX, Message, read

LARGEST = 1 << 36  # bytes of a payload: more is not a message of this program


class Link:
    """A connection. `on_message(link, message)` and, once, `on_end(link)` are called by its reading thread."""

    def __init__(
        self, connection: socket.socket, on_message: Callable[["Link", Message], None], on_end: Callable[["Link"], None]
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self.connection, self.on_message, self.on_end = connection, on_message, on_end
        self.peer: tuple[str, int] = ("", -1)  # set by the one who knows: ("worker", 1)
        self.bytes_sent = self.bytes_received = 0
        self.ended = False
        self._out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True).start()

    def send(self, message: Message) -> None:
        """Queue a message; it is lost if the link ends before."""
        self._out.put(message)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self._out.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._out.get()) is not None:
                header, payload = message.header(), message.payload()
                self.connection.sendall(PREFIX.pack(len(header), len(payload)) + header)
                if payload:
                    self.connection.sendall(payload)
                self.bytes_sent += PREFIX.size + len(header) + len(payload)
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                sizes = PREFIX.unpack(self._receive(PREFIX.size).tobytes())
                if sizes[1] > LARGEST:
                    break
                header, payload = self._receive(sizes[0]).tobytes(), self._receive(sizes[1])
                self.bytes_received += PREFIX.size + sum(sizes)
                self.on_message(self, read(header, payload))
        except (OSError, EOFError, ValueError, TypeError):  # the peer has died, or is not one of ours
            pass
        finally:
            self.close()
            self.connection.close()
            self.ended = True
            self.on_end(self)

    def _receive(self, size: int) -> np.ndarray:
        buffer = np.empty(size, np.uint8)
        view, at = buffer.data, 0
        while at < size:
            got = self.connection.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return buffer


def connect(
    address: tuple[str, int],
    token: str,
    hello: Message,
    on_message: Callable[[Link, Message], None],
    on_end: Callable[[Link], None],
    *,
    timeout: float = 1.0,
) -> Link:
    """A link to a listener; raises OSError. `hello` says who this is."""
    link = Link(socket.create_connection(address, timeout=timeout), on_message, on_end)
    link.send(Message(kind="hello", more={**hello.more, "token": token}, epoch=hello.epoch, worker=hello.worker))
    return link


class Listener:
    """Accepts links whose hello has the token; `on_hello(link, message)` then comes before other messages."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        on_hello: Callable[[Link, Message], None],
        on_message: Callable[[Link, Message], None],
        on_end: Callable[[Link], None],
    ) -> None:
        self._server = socket.create_server((host, port), backlog=64)
        self.address: tuple[str, int] = (host, self._server.getsockname()[1])
        self._token, self._hello, self._message, self._end = token, on_hello, on_message, on_end
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            Link(connection, self._first, self._ended)

    def _first(self, link: Link, message: Message) -> None:
        if message.kind != "hello" or not hmac.compare_digest(str(message.more.get("token")), self._token):
            link.close()
            return
        link.on_message = self._message
        self._hello(link, message)

    def _ended(self, link: Link) -> None:
        if link.on_message == self._message:
            self._end(link)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
