"""Requests on their way into the engine."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NamedTuple

from bagu.errors import BaguError
from bagu.serve.constrain.check import CheckedCompiler
from bagu.serve.request import Request, Unservable
from bagu.serve.wire.encode import send
from bagu.serve.wire.messages import Accepted, Refused

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.serve.engine import Engine
import os
import queue
import time
from typing import Any

Messages = queue.SimpleQueue[tuple[float, Any]]  # (arrival by `time.perf_counter`, message)
HEARTBEAT_S = 1.0


def receive(pipe: Connection, messages: Messages) -> None:
    """Read messages from the pipe, also while a step runs, and record their arrival times."""
    try:
        while True:
            message = pipe.recv()
            messages.put((time.perf_counter(), message))
    except (EOFError, OSError):  # the server has exited
        os._exit(0)


def take_messages(messages: Messages, *, wait: bool) -> list[tuple[float, Any]]:
    """All received messages. With `wait`, waits up to HEARTBEAT_S for the first one."""
    found = []
    try:
        if wait:
            found.append(messages.get(timeout=HEARTBEAT_S))
        while True:
            found.append(messages.get_nowait())
    except queue.Empty:
        return found


class Compiled(NamedTuple):
    """The grammar of this request is compiled, or refused; sent by a thread of the engine process."""

    request: Request


class RequestQueue:
    """Submits requests. One with a new grammar waits here until other threads have compiled it, while the engine runs
    the others. `waiting` gets the arrival times of the requests without a token."""

    def __init__(self, pipe: Connection, messages: Messages, engine: Engine, waiting: dict[str, float]) -> None:
        self.pipe, self.messages, self.engine, self.waiting = pipe, messages, engine, waiting
        self._compiler = None if engine.grammars is None else CheckedCompiler(engine.grammars)
        self._compiling: set[str] = set()  # ids of requests

    def submit(self, request: Request, arrival: float) -> None:
        """Queue a request and send `Accepted`, now or when its grammar is compiled; or send `Refused`."""
        grammar, compiler = request.sampling.grammar, self._compiler
        if grammar is not None and compiler is not None and not compiler.compiler.has_result(grammar):
            self._compiling.add(request.id)
            compiler.prepare(grammar, partial(self.messages.put, (arrival, Compiled(request))))
            return
        try:
            self.engine.submit(request)
            self.waiting[request.id] = arrival
            send(self.pipe, Accepted(request.id))
        except BaguError as error:  # only this request is refused
            param, later = (error.param, error.temporary) if isinstance(error, Unservable) else (None, False)
            send(self.pipe, Refused(request.id, str(error), error.hint, param, 503 if later else 400))

    def compiled(self, request: Request, arrival: float) -> None:
        if request.id in self._compiling:  # it was not aborted
            self._compiling.remove(request.id)
            self.submit(request, arrival)

    def abort(self, request_id: str) -> None:
        self._compiling.discard(request_id)
        self.engine.abort(request_id)
        self.waiting.pop(request_id, None)

    def close(self) -> None:
        """End the processes that compile."""
        if self._compiler is not None:
            self._compiler.close()
