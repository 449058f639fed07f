"""One replica: an engine process, and what the router knows of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from bagu.parallel.unlike.profile import Step
from bagu.serve.http.errors import ApiError
from bagu.serve.http.launch import LocalEngine
from bagu.serve.http.pending import PendingCalls
from bagu.serve.http.process import EngineProcess
from bagu.serve.replicas.load import ReplicaLoad
from bagu.serve.replicas.options import ReplicaSpec
from bagu.serve.request import Event
from bagu.serve.wire.messages import Ready


class Owner(Protocol):
    """What a replica reports to."""

    pending: PendingCalls

    def on_tokens(self, replica: Replica, events: Sequence[Event], now: float) -> Sequence[Event]: ...
    def on_accepted(self, replica: Replica, request_id: str) -> None: ...
    def on_refused(self, replica: Replica, request_id: str, error: ApiError) -> None: ...
    def on_end(self, replica: Replica, error: ApiError) -> None: ...
    def on_message(self, replica: Replica, message: Any) -> None: ...


class ReplicaCalls(PendingCalls):
    """What an engine process takes for its calls: they are those of the server, and may move to another replica."""

    def __init__(self, replica: Replica, owner: Owner) -> None:
        super().__init__(owner.pending.capacity, owner.pending.metrics)
        self._replica, self._owner = replica, owner

    def deliver(self, events: Sequence[Event], first_tokens: Sequence[tuple[float, float]] = ()) -> None:
        self.last_message = now = time.perf_counter()
        if events:
            events = self._owner.on_tokens(self._replica, events, now)
        self._owner.pending.deliver(events, first_tokens)

    def accept(self, request_id: str) -> None:
        self._owner.on_accepted(self._replica, request_id)

    def fail(self, request_id: str, error: ApiError) -> list[str]:
        self._owner.on_refused(self._replica, request_id, error)
        return []  # the owner aborts the other requests of the call, which may be elsewhere

    def fail_all(self, error: ApiError) -> None:
        self._owner.on_end(self._replica, error)


class Replica:
    """`number` is its place in the list; a process of it runs between `start` and `stop`."""

    def __init__(self, number: int, spec: ReplicaSpec, owner: Owner, *, stall_s: float) -> None:
        self.number, self.spec, self._owner, self._stall_s = number, spec, owner, stall_s
        self.process: EngineProcess | None = None
        self.load: ReplicaLoad | None = None  # from the first `Ready` on
        self.is_draining = False
        self.restarts = 0
        self.predicted_s = self.measured_s = 0.0  # to the first tokens, of all requests that had one here
        self.answered = 0

    @property
    def state(self) -> str:
        if self.process is None:
            return "stopped"
        return "draining" if self.is_draining else self.process.state

    @property
    def takes_requests(self) -> bool:
        return self.load is not None and self.state == "ready"

    def silence(self, now: float) -> float:
        """Seconds since its last message, if it serves; an engine without work sends one every second."""
        if self.process is None or self.process.state != "ready":
            return 0.0
        return now - self.process.pending.last_message

    def has_adapter(self, name: str) -> bool:
        return self.process is not None and name in self.process.adapters

    async def start(self, *, niceness: int = 0) -> bool:
        """Start the process and wait until it is warm; False if it did not start."""
        spec = self.spec
        self.is_draining = False
        self.process = process = EngineProcess(
            spec.load,
            spec.config,
            ReplicaCalls(self, self._owner),
            stall_s=self._stall_s,
            niceness=niceness,
            load_draft=spec.load_draft,
            on_message=lambda message: self._owner.on_message(self, message),
            launch=spec.launch or LocalEngine,
        )
        process.start()
        await process.wait_until_settled()
        return process.state == "ready"

    async def stop(self) -> None:
        """Stop the process. What it had not finished is moved or fails."""
        process = self.process
        if process is not None:
            await process.stop()
            self._owner.on_end(self, ApiError(503, "the replica was stopped", code="engine_died"))
            self.process = None

    def on_ready(self, ready: Ready) -> None:
        """The process serves, after the start or after a crash."""
        capacity = ready.capacity
        assert capacity is not None, "engines of several replicas are measured"
        if self.load is None:
            self.load = ReplicaLoad(capacity.cost, slots=capacity.slots, step_tokens=capacity.step_tokens)
        else:
            self.restarts += 1
            self.load.cost = capacity.cost

    def speed(self) -> str:
        """What was measured before it serves."""
        assert self.load is not None
        cost = self.load.cost
        prompt, decode = (1e3 * cost.seconds(step) for step in (Step.of_prompt(128), Step.of_decodes([128])))
        error = "" if cost.error is None else f"; {cost.error:.0%} off on steps that were not fitted"
        return f"a prompt of 128 tokens takes {prompt:.3g} ms, a token {decode:.3g} ms{error}"

    def first_tokens(self) -> dict[str, float]:
        """Mean milliseconds to the first token of its requests, predicted and measured."""
        means = {"predicted_first_token_ms": self.predicted_s, "measured_first_token_ms": self.measured_s}
        return {name: round(1e3 * s / self.answered, 1) for name, s in means.items()} if self.answered else {}

    def describe(self) -> dict[str, Any]:
        """For /health."""
        failure = "" if self.process is None or self.state == "ready" else self.process.failure
        return {
            "replica": self.number,
            "device": self.spec.name,
            "state": self.state,
            **({"reason": failure} if failure else {}),
            **self.first_tokens(),
        }
