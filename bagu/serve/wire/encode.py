"""How messages (messages.py) are encoded on the socket between the HTTP server's process and the engine process.

A message has the format of `multiprocessing.connection.Connection`: 4 bytes of length, then the content, which is a
pickle. `StepEvents` with only tokens, sent for every step, begins with `STEP_TAG` and is encoded with `marshal`.
"""

import asyncio
import marshal
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from bagu.serve.request import Event, TokenEvent
from bagu.serve.wire.messages import StepEvents

STEP_TAG = b"S"  # no pickle begins with it
_token_event = partial(tuple.__new__, TokenEvent)  # faster than `TokenEvent._make`, which is a Python function


def send(pipe: Connection, message: Any) -> None:
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def send_step(pipe: Connection, step: StepEvents) -> None:
    """Send `StepEvents` as plain tuples with `marshal`, which is faster than pickle: it is sent for every token."""
    if all(isinstance(event, TokenEvent) for event in step.events):
        pipe.send_bytes(STEP_TAG + marshal.dumps(([tuple(event) for event in step.events], tuple(step.first_tokens))))
    else:
        send(pipe, step)


def framed(message: Any) -> bytes:
    """A message preceded by its length, in the format of `Connection.recv`."""
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(4, "big") + content


class MessageReader(asyncio.Protocol):
    """Splits the bytes of the socket into messages.

    A step with only tokens is delivered directly from here. The CPU caches are cold at this point, so every Python call
    costs 2 to 4 µs; there are ten calls from here to the client's socket.
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
            if data.startswith(STEP_TAG, at + 4):
                events, first_tokens = marshal.loads(data[at + 5 : end])
                self._deliver(list(map(_token_event, events)), first_tokens)
            else:
                self._handle(pickle.loads(data[at + 4 : end]))
            at = end
        self._rest = data[at:]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
