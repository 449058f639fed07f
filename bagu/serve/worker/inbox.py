"""The messages that the engine process has received and not handled yet."""

from __future__ import annotations

import os
import queue
import time
from multiprocessing.connection import Connection
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
