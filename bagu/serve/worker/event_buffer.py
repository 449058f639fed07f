"""When the events of a step are sent to the HTTP server's process: at once, or with those of the next steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from bagu.serve.request import Event, TokenEvent
from bagu.serve.wire.encode import send_step
from bagu.serve.wire.messages import StepEvents

HOLD_S = 0.004  # how long a token may wait for the tokens of the next steps; a display refreshes every 0.016 s


class EventBuffer:
    """Collects the events of short steps and sends them to the server in one message.

    Every message costs the server 0.1 ms to wake up, however small it is. Steps of a small model take less than a
    millisecond, so their events are sent together every HOLD_S. Two kinds of events are sent at once: those that are
    not the plain next token of a choice, and all events while a prompt waits, since its prefill step may be long.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.events = pipe, list[Event]()
        self.sent = self.stepped = time.perf_counter()

    def add(self, events: Sequence[Event], first_tokens: Sequence[tuple[float, float]], *, send_now: bool) -> None:
        """Add the events of a step that has just ended; send them now or later."""
        self.events += events
        now, before = time.perf_counter(), self.stepped
        self.stepped = now
        plain = all(isinstance(event, TokenEvent) and event.finish is None for event in events)
        if send_now or not plain or now - before >= HOLD_S or now - self.sent >= HOLD_S:
            self._send(first_tokens)

    def flush(self) -> None:
        if self.events:
            self._send(())

    def _send(self, first_tokens: Sequence[tuple[float, float]]) -> None:
        send_step(self.pipe, StepEvents(self.events, first_tokens))
        self.events, self.sent = [], time.perf_counter()
