"""An engine process on another machine: a server has asked for it, and it connects to that server.

    server                                        python -m bagu.serve.worker HOST PORT
    offer: a port, and a key of this engine  ->   join: connect; both prove that they have the key
    the arguments of `engine_main`           ->   from here on the same messages as on one machine (wire/)

The key is in the environment of the process. The messages are pickles, so neither side reads one before the other has
shown that it has the key; what is sent is not encrypted.
"""

from __future__ import annotations

import hmac
import os
import pickle
import secrets
import socket
from typing import TYPE_CHECKING

from bagu.errors import BaguError

if TYPE_CHECKING:
    from bagu.serve.http.launch import EngineStart

KEY = "BAGU_ENGINE_KEY"
WAIT_S = 30.0  # of a step of the greeting: the processes exist
BYTES = 32


class Offer:
    """A port on which one engine may connect."""

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(BYTES)
        self._listener = socket.create_server((host, 0))
        self.address = (host, int(self._listener.getsockname()[1]))

    def environ(self) -> dict[str, str]:
        return {KEY: self.key.hex()}

    def accept(self, start: EngineStart, timeout: float) -> socket.socket | None:
        """The connection of the engine, after it got what to serve; None if none comes in time. Others that
        connect are refused."""
        self._listener.settimeout(timeout)
        try:
            found, _ = self._listener.accept()
        except TimeoutError:
            return None
        found.settimeout(WAIT_S)
        try:
            prove(found, self.key, b"server", b"engine")
            content = pickle.dumps(tuple(start), pickle.HIGHEST_PROTOCOL)
            found.sendall(len(content).to_bytes(8, "big") + content)
        except (OSError, BaguError):
            found.close()
            return None
        return _ready(found)

    def close(self) -> None:
        self._listener.close()


def join(host: str, port: int) -> None:
    """Connect to a server and be its engine until the connection ends."""
    connection = socket.create_connection((host, port), timeout=WAIT_S)
    prove(connection, bytes.fromhex(os.environ.pop(KEY)), b"engine", b"server")
    size = int.from_bytes(_receive(connection, 8), "big")
    start = pickle.loads(_receive(connection, size))
    from bagu.serve.worker.main import engine_main

    engine_main(_ready(connection), *start)


def prove(connection: socket.socket, key: bytes, mine: bytes, theirs: bytes) -> None:
    """Show the other side that this one has the key, and raise BaguError if the other has not. The names of the sides
    are in what is signed, so an answer cannot be sent back."""
    own = secrets.token_bytes(BYTES)
    connection.sendall(own)
    other = _receive(connection, BYTES)
    connection.sendall(hmac.digest(key, mine + other, "sha256"))
    if not hmac.compare_digest(_receive(connection, BYTES), hmac.digest(key, theirs + own, "sha256")):
        raise BaguError("a process without the key of this engine has connected", hint="is another one scanning ports?")


def _receive(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise BaguError("the connection ended during the greeting", hint="the other side says why")
        parts += part
    return bytes(parts)


def _ready(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
