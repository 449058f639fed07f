"""Tickets: an HTTP call's place in the engine. Every ticket ends: all choices finished, or one failure.

The engine's process sends the events of one step in one message. `Tickets.deliver` sorts them into the mailboxes of
the calls that wait for them and takes the times; a call reads all that lies in its mailbox at once, so a slow client
costs fewer, larger chunks and never holds up another.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bagu.errors import BaguError
from bagu.serve.http.metrics import Metrics
from bagu.serve.request import Event, Finish, Request, TokenEvent

__all__ = ["ApiError", "Ticket", "Tickets"]

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}


class ApiError(BaguError):
    """What a client is told, in OpenAI's shape, with an HTTP status."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, hint: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message, hint=hint)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        message = f"{self.message} ({self.hint})" if self.hint else self.message
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code or self.status}}


@dataclass(slots=True)
class _Clock:
    """When the tokens of one choice came, in seconds of `time.perf_counter`."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class Ticket:
    """The requests of one HTTP call and the events that came for them."""

    requests: tuple[Request, ...]
    arrival: float = field(default_factory=time.perf_counter)
    clocks: dict[tuple[str, int], _Clock] = field(default_factory=dict)  # of the choices that have not ended
    mail: list[Event] = field(default_factory=list)
    failure: ApiError | None = None
    _accepted: int = 0  # requests
    _listener: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self.clocks.update(((r.id, i), _Clock()) for r in self.requests for i in range(r.sampling.n))

    @property
    def ended(self) -> bool:
        return not self.clocks or self.failure is not None

    def fail(self, error: ApiError) -> None:
        self.failure = error
        self.wake()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever something is new, in place of the one before. It must not raise: the events of other
        calls come after it."""
        self._listener = listener

    def wake(self) -> None:
        """Let the listener look again."""
        if self._listener is not None:
            self._listener()

    async def woken(self) -> None:
        """Wait for the next `wake`."""
        woken = asyncio.get_running_loop().create_future()
        self.listen(lambda: None if woken.done() else woken.set_result(None))
        await woken

    def accept(self) -> None:
        """One of the requests is in the engine's queue, past all that could refuse it."""
        self._accepted += 1
        self.wake()

    async def accepted(self) -> None:
        """Wait until all requests are in the engine's queue. Raises the failure."""
        while self._accepted < len(self.requests) and not self.mail and not self.ended:
            await self.woken()
        if self.failure is not None and not self.mail:
            raise self.failure

    def take(self) -> list[Event]:
        """All events since the last call. Raises the failure once there are none before it."""
        mail = self.mail
        if mail:
            self.mail = []
        elif self.failure is not None:
            raise self.failure
        return mail

    async def read(self) -> list[Event]:
        """All events since the last call, at least one; none after the last choice ended. Raises the failure."""
        while not (mail := self.take()) and not self.ended:
            await self.woken()
        return mail


class Tickets:
    """The calls in the engine, at most `capacity` choices at a time. An embedding call counts as one choice."""

    def __init__(self, capacity: int, metrics: Metrics) -> None:
        self.capacity = capacity
        self.metrics = metrics
        self.choices = 0  # in open tickets, and one for each embedding call
        self.heard = time.perf_counter()  # when the engine last said how far it is
        self._by_request: dict[str, Ticket] = {}
        self._ends: deque[float] = deque(maxlen=64)  # when the last choices ended: how fast the queue moves

    def __len__(self) -> int:
        return len(set(map(id, self._by_request.values())))

    def check_room(self, wanted: int) -> None:
        """Raise 400 where `wanted` choices never fit, and 429 where they do not fit beside those that are open."""
        if wanted > self.capacity:
            hint = (
                f"this server takes {self.capacity} at a time, those that wait included: ask for fewer, or raise "
                "max_num_seqs (bagu serve --max-num-seqs)"
            )
            raise ApiError(400, f"the request asks for {wanted} choices", param="n", hint=hint)
        if self.choices + wanted > self.capacity:
            raise self._full("choices")

    @contextmanager
    def embedding_call(self) -> Iterator[None]:
        """Count an embedding call, however many texts it has: calls take turns text by text. Raises 429 where
        `capacity` calls are open."""
        if self.choices >= self.capacity:
            raise self._full("calls")
        self.choices += 1
        try:
            yield
        finally:
            self.choices -= 1
            self._ends.append(time.perf_counter())

    def open(self, requests: Sequence[Request]) -> Ticket:
        """A ticket for `requests`; raises as `check_room` does."""
        wanted = sum(r.sampling.n for r in requests)
        self.check_room(wanted)
        ticket = Ticket(tuple(requests))
        self._by_request.update((r.id, ticket) for r in requests)
        self.choices += wanted
        for r in requests:
            self.metrics.prompt_tokens += len(r.prompt)
            self.metrics.request_prompt.observe(len(r.prompt))
        return ticket

    def close(self, ticket: Ticket, reason: Finish = "abort") -> list[str]:
        """Forget a ticket; returns the ids of its requests that had not ended, for the engine to abort."""
        alive = sorted({id for id, _ in ticket.clocks})
        for request in ticket.requests:
            self._by_request.pop(request.id, None)
        self.choices -= len(ticket.clocks)
        self.metrics.finished[reason] += len(ticket.clocks)
        ticket.clocks.clear()
        return alive

    def deliver(self, events: Sequence[Event], first_tokens: Sequence[tuple[float, float]] = ()) -> None:
        """The events of one step, and the seconds of queue and prefill of the requests whose first token is in it;
        events of tickets closed meanwhile are dropped. A listener is called once."""
        now = self.heard = time.perf_counter()
        woken = []
        for event in events:
            ticket = self._by_request.get(event[0])
            if ticket is None:
                continue
            if isinstance(event, TokenEvent) and (clock := ticket.clocks.get(event[:2])) is not None:
                if event.finish is None and clock.tokens:  # neither the first token nor the last: nearly all
                    self.metrics.between_tokens.observe(now - clock.last)
                    clock.last = now
                    clock.tokens += 1
                else:
                    self._time(ticket, event, clock, now)
            if not ticket.mail:  # else the listener has been told, and has not come yet
                woken.append(ticket)
            ticket.mail.append(event)
        for ticket in woken:
            ticket.wake()
        for queue_s, prefill_s in first_tokens:
            self.metrics.queue_time.observe(queue_s)
            self.metrics.prefill_time.observe(prefill_s)
            self.metrics.engine_first_token.observe(queue_s + prefill_s)

    def accept(self, request_id: str) -> None:
        if (ticket := self._by_request.get(request_id)) is not None:
            ticket.accept()

    def fail(self, request_id: str, error: ApiError) -> list[str]:
        """End the ticket of a request with an error; returns its other requests, for the engine to abort."""
        ticket = self._by_request.get(request_id)
        if ticket is None:
            return []
        alive = self.close(ticket, "error")
        ticket.fail(error)
        return [id for id in alive if id != request_id]

    def fail_all(self, error: ApiError) -> None:
        for id in list(self._by_request):
            self.fail(id, error)

    def _time(self, ticket: Ticket, event: TokenEvent, clock: _Clock, now: float) -> None:
        """The first event of a choice, or its last."""
        metrics = self.metrics
        if event.token is not None:
            if clock.tokens:
                metrics.between_tokens.observe(now - clock.last)
            else:
                clock.first = now
                metrics.first_token.observe(now - ticket.arrival)
            clock.last = now
            clock.tokens += 1
        if event.finish is not None:
            del ticket.clocks[event[:2]]
            self.choices -= 1
            metrics.finished[event.finish] += 1
            self._ends.append(now)
            metrics.end_to_end.observe(now - ticket.arrival)
            metrics.request_generation.observe(clock.tokens)
            metrics.decode_time.observe(clock.last - clock.first)
            if clock.tokens > 1:
                metrics.per_output_token.observe((clock.last - clock.first) / (clock.tokens - 1))

    def _full(self, unit: str) -> ApiError:
        found = f"the queue is full: {self.choices} of {self.capacity} {unit} are running or waiting"
        return ApiError(429, found, code="queue_full", headers={"Retry-After": str(self._retry_after())})

    def _retry_after(self) -> int:
        """Seconds until about half of the queue has moved on, at the rate of the last 64 ends; 1 to 60."""
        if len(self._ends) < 2:
            return 1
        rate = len(self._ends) / max(time.perf_counter() - self._ends[0], 1e-3)
        return min(max(math.ceil(self.capacity / 2 / rate), 1), 60)
