"""HTTP calls that wait for the engine. Every call ends: all its choices finish, or it fails with one error.

The engine process sends the events of a step in one message. `PendingCalls.deliver` distributes them to the calls and
records the latencies. A call reads all its new events at once, so a slow client gets fewer and larger chunks and never
delays another client.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bagu.serve.http.errors import ApiError
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.request import Event, Finish, Request, TokenEvent


@dataclass(slots=True)
class _TokenTimes:
    """When the tokens of one choice arrived, in seconds of `time.perf_counter`."""

    first: float = 0.0
    last: float = 0.0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class PendingCall:
    """The requests of one HTTP call, and the events received for them."""

    requests: tuple[Request, ...]
    arrival: float = field(default_factory=time.perf_counter)
    unfinished: dict[tuple[str, int], _TokenTimes] = field(default_factory=dict)  # by request id and choice
    events: list[Event] = field(default_factory=list)  # not read yet
    failure: ApiError | None = None
    started: float | None = None  # begin of the first step of a request, by `time.perf_counter`
    first_token: float | None = None  # arrival of the first token
    prompt_tokens: int = 0  # of the requests that the engine has queued
    num_tokens: int = 0  # of ended choices
    finish_reasons: list[Finish] = field(default_factory=list)  # of ended choices
    _offered: dict[str, int] = field(default_factory=dict)  # prompt tokens of requests that are not queued yet
    _callback: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        self._offered.update((r.id, len(r.prompt)) for r in self.requests)
        self.unfinished.update(((r.id, i), _TokenTimes()) for r in self.requests for i in range(r.sampling.n))

    @property
    def ended(self) -> bool:
        return not self.unfinished or self.failure is not None

    def fail(self, error: ApiError) -> None:
        self.failure = error
        self.notify()

    def set_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` at every update; it replaces the previous callback. It must not raise, since the events of
        other calls are delivered after it."""
        self._callback = callback

    def notify(self) -> None:
        """Run the callback, if there is one."""
        if self._callback is not None:
            self._callback()

    async def wait_for_update(self) -> None:
        """Wait for the next `notify`."""
        updated = asyncio.get_running_loop().create_future()
        self.set_callback(lambda: None if updated.done() else updated.set_result(None))
        await updated

    def accept(self, request_id: str) -> int:
        """Record that the engine has queued one of the requests, after all its checks; returns its prompt tokens."""
        count = self._offered.pop(request_id)
        self.prompt_tokens += count
        self.notify()
        return count

    async def wait_until_accepted(self) -> None:
        """Wait until the engine has queued all requests. Raises the failure."""
        while self._offered and not self.events and not self.ended:
            await self.wait_for_update()
        if self.failure is not None and not self.events:
            raise self.failure

    def take_events(self) -> list[Event]:
        """All events since the last call. Raises the failure if there are no events before it."""
        events = self.events
        if events:
            self.events = []
        elif self.failure is not None:
            raise self.failure
        return events

    async def read(self) -> list[Event]:
        """Wait for new events and return them; an empty list after all choices have finished. Raises the failure."""
        while not (events := self.take_events()) and not self.ended:
            await self.wait_for_update()
        return events


class PendingCalls:
    """The calls in the engine, with at most `capacity` choices at a time. An embedding call counts as one choice."""

    def __init__(self, capacity: int, metrics: Metrics) -> None:
        self.capacity = capacity
        self.metrics = metrics
        self.choices = 0  # unfinished choices, plus one per embedding call
        self.last_message = time.perf_counter()  # time of the engine's last message
        self._by_request: dict[str, PendingCall] = {}
        self._finish_times: deque[float] = deque(maxlen=64)  # of the last choices, for Retry-After

    def check_capacity(self, wanted: int) -> None:
        """Raise 400 if `wanted` choices can never fit, and 429 if they do not fit now."""
        if wanted > self.capacity:
            hint = (
                f"this server takes {self.capacity} at a time, including those that wait: ask for fewer, or raise "
                "max_num_seqs (bagu serve --max-num-seqs)"
            )
            raise ApiError(400, f"the request asks for {wanted} choices", param="n", hint=hint)
        if self.choices + wanted > self.capacity:
            raise self._full("choices")

    @contextmanager
    def embedding_call(self) -> Iterator[None]:
        """Count an embedding call as one choice, however many texts it has: the encoder takes one text of each call in
        turn. Raises 429 if the capacity is used."""
        if self.choices >= self.capacity:
            raise self._full("calls")
        self.choices += 1
        try:
            yield
        finally:
            self.choices -= 1
            self._finish_times.append(time.perf_counter())

    def open(self, requests: Sequence[Request]) -> PendingCall:
        """Add a call with these requests; raises the errors of `check_capacity`."""
        wanted = sum(r.sampling.n for r in requests)
        self.check_capacity(wanted)
        call = PendingCall(tuple(requests))
        self._by_request.update((r.id, call) for r in requests)
        self.choices += wanted
        return call

    def close(self, call: PendingCall, reason: Finish = "abort") -> list[str]:
        """Remove a call; returns the ids of its unfinished requests, which the engine must abort."""
        unfinished = sorted({id for id, _ in call.unfinished})
        for request in call.requests:
            self._by_request.pop(request.id, None)
        self.choices -= len(call.unfinished)
        self.metrics.finished[reason] += len(call.unfinished)
        call.finish_reasons += [reason] * len(call.unfinished)
        call.num_tokens += sum(times.tokens for times in call.unfinished.values())
        call.unfinished.clear()
        return unfinished

    def deliver(self, events: Sequence[Event], first_tokens: Sequence[tuple[float, float]] = ()) -> None:
        """Distribute the events of one step, and record the (queue, prefill) seconds of the requests whose first token
        is among them. Events of closed calls are dropped. Every call is notified at most once."""
        now = self.last_message = time.perf_counter()
        updated = []
        for event in events:
            call = self._by_request.get(event[0])
            if call is None:
                continue
            if isinstance(event, TokenEvent) and (times := call.unfinished.get(event[:2])) is not None:
                if event.finish is None and times.tokens:  # neither the first token nor the last: the common case
                    self.metrics.between_tokens.observe(now - times.last)
                    times.last = now
                    times.tokens += 1
                else:
                    self._record(call, event, times, now)
            if not call.events:  # otherwise the call is already notified and has not read the events yet
                updated.append(call)
            call.events.append(event)
        for call in updated:
            call.notify()
        for queue_s, prefill_s in first_tokens:
            self.metrics.queue_time.observe(queue_s)
            self.metrics.prefill_time.observe(prefill_s)
            self.metrics.engine_first_token.observe(queue_s + prefill_s)

    def accept(self, request_id: str) -> None:
        if (call := self._by_request.get(request_id)) is not None:
            count = call.accept(request_id)
            self.metrics.prompt_tokens += count
            self.metrics.request_prompt.observe(count)

    def fail(self, request_id: str, error: ApiError) -> list[str]:
        """End the call of a request with an error; returns its other requests, which the engine must abort."""
        call = self._by_request.get(request_id)
        if call is None:
            return []
        if error.status >= 500:
            self.metrics.errors += len(call.unfinished)
        unfinished = self.close(call, "error")
        call.fail(error)
        return [id for id in unfinished if id != request_id]

    def fail_all(self, error: ApiError) -> None:
        for id in list(self._by_request):
            self.fail(id, error)

    def _record(self, call: PendingCall, event: TokenEvent, times: _TokenTimes, now: float) -> None:
        """Record the first or the last event of a choice."""
        metrics = self.metrics
        if event.token is not None:
            if times.tokens:
                metrics.between_tokens.observe(now - times.last)
            else:
                times.first = now
                if call.first_token is None:
                    call.started, call.first_token = event.started, now
                metrics.first_token.observe(now - call.arrival)
            times.last = now
            times.tokens += 1
        if event.finish is not None:
            del call.unfinished[event[:2]]
            self.choices -= 1
            metrics.finished[event.finish] += 1
            call.finish_reasons.append(event.finish)
            call.num_tokens += times.tokens
            self._finish_times.append(now)
            metrics.end_to_end.observe(now - call.arrival)
            metrics.request_generation.observe(times.tokens)
            metrics.decode_time.observe(times.last - times.first)
            if times.tokens > 1:
                metrics.per_output_token.observe((times.last - times.first) / (times.tokens - 1))

    def _full(self, unit: str) -> ApiError:
        found = f"the queue is full: {self.choices} of {self.capacity} {unit} are running or waiting"
        return ApiError(429, found, code="queue_full", headers={"Retry-After": str(self._retry_after())})

    def _retry_after(self) -> int:
        """Seconds until about half of the queue has finished, at the rate of the last 64 choices; 1 to 60."""
        if len(self._finish_times) < 2:
            return 1
        rate = len(self._finish_times) / max(time.perf_counter() - self._finish_times[0], 1e-3)
        return min(max(math.ceil(self.capacity / 2 / rate), 1), 60)
