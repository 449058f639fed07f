"""The main loop of the engine process for a model that generates text."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from bagu.serve.kv.blocks import IndexChanges
from bagu.serve.request import Event, TokenEvent
from bagu.serve.wire.encode import send, send_step
from bagu.serve.wire.messages import (
    Abort,
    CacheChanges,
    Capacity,
    Chat,
    Embed,
    GetIndex,
    GetStats,
    LoadAdapter,
    Ready,
    Result,
    StepEvents,
    Stop,
    Submit,
    UnloadAdapter,
)
from bagu.serve.worker.adapter_loader import AdapterLoader, AdapterRead
from bagu.serve.worker.request_queue import Compiled, Messages, RequestQueue, take_messages

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    from bagu.serve.engine import Engine
    from bagu.serve.warm_up import WarmUp


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


def serve_generation(
    pipe: Connection,
    messages: Messages,
    engine: Engine,
    chat: Chat | None,
    warming: WarmUp,
    capacity: Capacity | None = None,
) -> None:
    """Send `Ready`; then handle messages, run steps and send their events, until `Stop`. What `warming` has left runs
    while there is no request. With a `capacity`, changes of the prefix cache are sent too."""
    assert engine.tokenizer is not None
    ready = Ready(
        tokenizer=engine.tokenizer,
        chat=chat,
        generates=True,
        max_model_len=engine.max_model_len,
        vocab_size=engine.model.config.vocab_size,
        defaults=engine.config.generation,
        tool_parser=engine.config.tool_parser,
        reasoning_parser=engine.config.reasoning_parser,
        adapters=engine.adapters.infos,
        loads_adapters=engine.config.adapter_root is not None,
        capacity=capacity,
        images=None if engine.images is None else engine.images.spec,
    )
    _ = ready.longest_token  # computed here, so that the first request does not wait for it
    if engine.config.adapter_slots:
        print(f"bagu serve: {engine.adapters.room()}", file=sys.stderr, flush=True)
    send(pipe, ready)
    if capacity is not None:
        engine.blocks.changes = IndexChanges()
    loop = _Loop(pipe, messages, engine, warming)
    try:
        loop.run()
    finally:
        loop.requests.close()


class _Loop:
    def __init__(self, pipe: Connection, messages: Messages, engine: Engine, warming: WarmUp) -> None:
        self.pipe, self.messages, self.engine, self.warming = pipe, messages, engine, warming
        self.waiting: dict[str, float] = {}  # arrival times of requests without a token
        self.requests = RequestQueue(pipe, messages, engine, self.waiting)
        self.adapters = AdapterLoader(pipe, messages, engine)
        self.buffer = EventBuffer(pipe)
        self.sent_changes = 0

    def run(self) -> None:
        engine = self.engine
        while True:
            received = take_messages(self.messages, wait=not (engine.has_work or self.warming.left))
            if received:
                self.buffer.flush()
            for arrival, message in received:
                if isinstance(message, Stop):
                    return
                self._handle(message, arrival)
            if not engine.has_work:
                engine.check_ranks()
                send_step(self.pipe, StepEvents([]))
                if self.warming.left:
                    self.warming.next()
                continue
            events = engine.step()
            self._send_changes()
            first_tokens = _first_tokens(events, self.waiting) if self.waiting else ()
            send_now = bool(first_tokens or self.waiting or engine.scheduler.queues.waiting)
            self.buffer.add(events, first_tokens, send_now=send_now)

    def _send_changes(self) -> None:
        """Before the events of the step: who reads them may send a request with the same prefix at once."""
        if changes := self.engine.blocks.changes:
            send(self.pipe, CacheChanges(self.sent_changes, *changes.take()))
            self.sent_changes += 1

    def _handle(self, message: Any, arrival: float) -> None:
        if isinstance(message, Submit):
            for request in message.requests:
                self.requests.submit(request, arrival)
        elif isinstance(message, Compiled):
            self.requests.compiled(message.request, arrival)
        elif isinstance(message, Abort):
            for id in message.request_ids:
                self.requests.abort(id)
        elif isinstance(message, LoadAdapter):
            self.adapters.load(message)
        elif isinstance(message, AdapterRead):
            self.adapters.install(message)
        elif isinstance(message, UnloadAdapter):
            self.adapters.unload(message)
        elif isinstance(message, GetIndex):
            if (changes := self.engine.blocks.changes) is not None:
                changes.take()
                send(self.pipe, CacheChanges(self.sent_changes, True, list(self.engine.blocks.index), ()))
                self.sent_changes += 1
        elif isinstance(message, GetStats):
            send(self.pipe, Result(message.call, self.engine.stats()))
        elif isinstance(message, Embed):
            send(self.pipe, Result(message.call, None, "this server generates text and has no embeddings"))


def _first_tokens(events: Sequence[Event], waiting: dict[str, float]) -> list[tuple[float, float]]:
    """(seconds in the queue, seconds from the first step to the token) of the requests whose first token is here.
    Removes every request with an event from `waiting`; one with max_tokens = 0 has no first token."""
    now, found = time.perf_counter(), []
    for event in events:
        if not isinstance(event, TokenEvent):
            continue
        arrival = waiting.pop(event.request_id, None)
        if arrival is not None and event.token is not None and event.started is not None:
            found.append((event.started - arrival, now - event.started))
    return found
