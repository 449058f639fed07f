"""Several engines of one model that answer as one (`EngineProcess` is the interface of both).

    submit   the router chooses a replica for each request of a call, when its prompt is tokenized
    close    its unfinished requests are aborted where they are
    silence  of a replica for `silent_s`: it gets no requests, and those without a token go to another one
    death    of a replica, or silence for `stall_s`: the same, and streams that began end with an error event; the
             process is started again (http/process.py)

The calls, the metrics and the queue limit are one for all replicas, so that API keys, drains, hot swaps and the page
do not know of them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Literal

from bagu.serve.adapters.info import AdapterInfo
from bagu.serve.http.errors import ApiError
from bagu.serve.http.pending import PendingCall, PendingCalls
from bagu.serve.http.process import SHUTTING_DOWN
from bagu.serve.images.prompt import keyed
from bagu.serve.replicas.index import Match, PrefixIndex, Promise
from bagu.serve.replicas.load import OUTPUT_MEMORY, Ask, Progress, least_wait
from bagu.serve.replicas.options import ReplicaSpec
from bagu.serve.replicas.replica import Replica
from bagu.serve.replicas.report import replica_metrics, summed
from bagu.serve.replicas.router import Candidate, Router
from bagu.serve.replicas.scale import BUSY_MEMORY, TICK_S, Scaler
from bagu.serve.request import Event, Request, TokenEvent
from bagu.serve.stats import EngineStats
from bagu.serve.wire.messages import Abort, CacheChanges, GetIndex, Ready, Submit

MOVES = 2  # how often a request goes to another replica: it may be what ends them
USUAL_OUTPUT = 128  # tokens of an answer, before any has ended
SILENT_S = 10.0  # until a replica counts as silent, or twice what its next step should take if that is longer
NICENESS = 10  # of loading beside replicas that serve
RETRY_S = 30.0  # until a replica that did not start is tried again
DRAIN_S = 300.0  # a replica that is stopped lets its requests finish for this long


@dataclass(slots=True)
class _Sent:
    """A request that has not ended, and where it is."""

    request: Request
    replica: Replica
    ask: Ask
    promise: Promise | None  # of blocks that it will compute
    at: float
    predicted: float  # seconds to the first token
    accepted: bool = False
    started: bool = False
    moves: int = 0
    choices: int = 1  # unfinished
    tokens: int = 0


class ReplicaSet:
    def __init__(
        self, specs: Sequence[ReplicaSpec], pending: PendingCalls, *, router: str = "finish", least: int | None = None,
        stall_s: float = 60.0, on_failure: Callable[[], None] = lambda: None, niceness: int = 0,
        scaler: Scaler | None = None, silent_s: float = SILENT_S,
    ) -> None:  # fmt: skip
        self.pending, self.router = pending, Router(router)
        pending.metrics.more_lines = self.metrics
        self.replicas = [Replica(i, spec, self, stall_s=stall_s) for i, spec in enumerate(specs)]
        self.stall_s, self.silent_s = stall_s, silent_s
        self.failure = ""
        self.adapters: Mapping[str, AdapterInfo] = {}
        self.ready: Ready | None = None
        self._scaler = scaler or Scaler(len(specs) if least is None else least, len(specs))
        self._on_failure, self._niceness = on_failure, niceness
        self._index: PrefixIndex | None = None
        self._sent: dict[str, _Sent] = {}
        self._paths: dict[str, str] = {}  # adapters loaded by requests, for replicas that start later
        self._output = float(USUAL_OUTPUT)  # mean tokens of an answer
        self._busy = 0.0  # replicas with work, of late
        self._settled, self._stopped = asyncio.Event(), False
        self._tasks: set[asyncio.Task[None]] = set()
        self._embeds = count()

    # The processes

    @property
    def serving(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.takes_requests]

    @property
    def state(self) -> Literal["loading", "warming", "ready", "restarting", "failed", "stopped"]:
        if self._stopped:
            return "stopped"
        if self.serving:
            return "ready"
        states = [r.process.state for r in self.replicas if r.process is not None]
        if self._settled.is_set():
            return "restarting" if any(s != "failed" for s in states) else "failed"
        return "warming" if "warming" in states else "loading"

    def start(self) -> None:
        self._run(self._start())

    async def stop(self, timeout: float = 5.0) -> None:
        for replica in self.replicas if not self._stopped else ():
            if first := replica.first_tokens():
                said = ", ".join(f"{name.split('_')[0]} {value:g} ms" for name, value in first.items())
                _log(
                    f"replica {replica.number} ({replica.spec.name}): {replica.answered} requests, mean time to the "
                    f"first token {said}"
                )
        self._stopped = True
        self._settled.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        processes = [r.process for r in self.replicas if r.process is not None]
        await asyncio.gather(*(process.stop(timeout) for process in processes))

    def fail_calls(self) -> None:
        self._stopped = True
        self.pending.fail_all(ApiError(503, SHUTTING_DOWN, code="shutting_down", headers={"Retry-After": "1"}))

    async def wait_until_settled(self) -> None:
        await self._settled.wait()

    def require_ready(self) -> Ready:
        """The properties of the model. Raises 503 with the reason if no replica is ready."""
        if self.state == "ready" and self.ready is not None:
            return self.ready
        for replica in self.replicas:
            if replica.process is not None and not self._stopped:
                replica.process.require_ready()  # raises its reason
        raise ApiError(503, SHUTTING_DOWN, code="engine_stopped", headers={"Retry-After": "1"})

    def unhealthy_reason(self) -> str | None:
        """None if a replica is healthy; at the start, only after all have started or failed."""
        processes = [r.process for r in self.replicas if r.process is not None]
        if not self._settled.is_set():
            ready = sum(process.state == "ready" for process in processes)
            return f"{ready} of {self._scaler.least} replicas are ready"
        reasons = [process.unhealthy_reason() for process in processes]
        return None if None in reasons else "; ".join(dict.fromkeys(filter(None, reasons))) or SHUTTING_DOWN

    async def _start(self) -> None:
        """CPU replicas start one after the other, so that each is measured without the others' loading."""
        first = self.replicas[: self._scaler.least]
        alone = [r for r in first if r.spec.name.startswith("cpu")]

        async def in_turn() -> None:
            for replica in alone:
                await self._start_one(replica, self._niceness)

        others = (self._start_one(r, self._niceness) for r in first if r not in alone)
        await asyncio.gather(in_turn(), *others)
        self._settled.set()
        if not self.serving and not self._stopped:
            self._on_failure()
            return
        if self._scaler.least < self._scaler.most:
            self._run(self._keep_scaling())
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self._check_silence(now, now - last - TICK_S)
            last = now

    async def _start_one(self, replica: Replica, niceness: int) -> None:
        if not await replica.start(niceness=niceness) and not self._stopped:
            assert replica.process is not None
            self.failure = replica.process.failure
            _log(f"replica {replica.number} ({replica.spec.name}) did not start: {self.failure}")

    def _check_silence(self, now: float, late: float) -> None:
        """Move the requests of silent replicas that have no token yet; end a replica that stays silent. `late`: so long
        this process itself was stopped or blocked, and read no messages."""
        for replica in self.replicas:
            if late > 4 * TICK_S and replica.process is not None:
                replica.process.pending.last_message += late
            if self._is_silent(replica, now):
                self._move(replica)
            if replica.process is not None and (silence := replica.silence(now)) > max(self.stall_s, self.silent_s):
                replica.process.kill(f"no message for {silence:.0f} s")

    def _is_silent(self, replica: Replica, now: float) -> bool:
        step = 0.0 if replica.load is None else replica.load.next_step()
        return replica.silence(now) > max(self.silent_s, 2 * step)

    def _move(self, replica: Replica) -> None:
        """Send what has no token yet to other replicas, if one answers. The engine may go on: it gets an abort, and
        its messages about these requests are ignored."""
        if not any(not self._is_silent(r, time.perf_counter()) for r in self.serving):
            return
        moving = [s for s in self._sent.values() if s.replica is replica and not s.started and s.moves < MOVES]
        if moving:
            _log(f"replica {replica.number} is silent: {len(moving)} requests without a token go to others")
        for sent in moving:
            self._abort([sent.request.id])
            self._place(sent.request, sent.moves + 1, sent.accepted)

    def _able(self, now: float) -> list[Replica]:
        """The replicas that get requests: those that serve and are not silent; if all are, any of them."""
        return [replica for replica in self.serving if not self._is_silent(replica, now)] or self.serving

    async def _keep_scaling(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._scale()

    async def _scale(self) -> None:
        now, serving = time.perf_counter(), self.serving
        working = sum(r.load is not None and r.load.choices > 0 for r in serving)
        self._busy = BUSY_MEMORY * self._busy + (1 - BUSY_MEMORY) * working
        unused = [r for r in self.replicas if r.state in ("stopped", "failed")]
        changing, wait = len(self.replicas) - len(serving) - len(unused), self.predicted_wait(now)
        change = self._scaler.decide(now, ready=len(serving), changing=changing, wait_s=wait, busy=self._busy)
        if change == "grow" and unused:
            _log(f"requests would wait {wait:.2f} s: replica {unused[0].number} is started")
            await self._start_one(unused[0], NICENESS)
            if not unused[0].takes_requests:
                await asyncio.sleep(RETRY_S)
        elif change == "shrink":
            _log(f"{self._busy:.1f} of {len(serving)} replicas have work: replica {serving[-1].number} is stopped")
            self._run(self._drain(serving[-1]))

    async def _drain(self, replica: Replica) -> None:
        """Give a replica no more requests, let its own finish, and stop it."""
        replica.is_draining = True
        end = time.perf_counter() + DRAIN_S
        while any(s.replica is replica for s in self._sent.values()) and time.perf_counter() < end:
            await asyncio.sleep(0.05)
        await replica.stop()

    def predicted_wait(self, now: float) -> float:
        """Seconds until the prompt of a request that comes now would begin, at the replica where that is first."""
        return least_wait([r.load for r in self.serving if r.load is not None], self._output, now)

    def _run(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Requests

    def submit(self, requests: Sequence[Request]) -> PendingCall:
        self.require_ready()
        call = self.pending.open(requests)
        for request in call.requests:
            self._place(request)
        return call

    def close(self, call: PendingCall) -> None:
        self._abort(self.pending.close(call))

    def _place(self, request: Request, moves: int = 0, accepted: bool = False) -> None:
        """Choose a replica and send the request there; there is one that serves."""
        now = time.perf_counter()
        able = self._able(now)
        among = [r for r in able if request.adapter is None or r.has_adapter(request.adapter)] or able
        match = self._match(request, among)
        cached = match.cached if match is not None else {}
        output = min(request.sampling.max_tokens, round(self._output))
        output = request.sampling.max_tokens if request.sampling.ignore_eos else output
        ask = Ask(request.id, len(request.prompt), output, request.sampling.n)
        choice = self.router.choose(
            [Candidate(r.number, r.load, cached.get(r.number, 0)) for r in among if r.load is not None], ask, now
        )
        replica = self.replicas[choice.number]
        assert replica.load is not None and replica.process is not None
        replica.load.add(ask, choice.cached, now)
        promise = self._index.promise(replica.number, match) if self._index and match else None
        self._sent[request.id] = _Sent(
            request, replica, ask, promise, now, choice.forecast.first_token, accepted, False, moves, ask.choices
        )
        replica.process.send(Submit((request,)))

    def _match(self, request: Request, among: Sequence[Replica]) -> Match | None:
        """What each replica has of a prompt. An adapter's blocks have keys that differ between replicas
        (adapters/registry.py), and are taken for new."""
        if self._index is None or request.adapter is not None or request.sampling.prompt_logprobs is not None:
            return None
        content = keyed(request.prompt, request.images) if request.images else request.prompt
        return self._index.match(content, [r.number for r in among])

    def _abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            if (sent := self._forget(id)) is not None and sent.replica.process is not None:
                sent.replica.process.send(Abort((id,)))

    def _forget(self, id: str) -> _Sent | None:
        sent = self._sent.pop(id, None)
        if sent is not None:
            self._fulfil(sent)
            if sent.replica.load is not None:
                sent.replica.load.remove(id)
        return sent

    def _fulfil(self, sent: _Sent) -> None:
        if self._index is not None and sent.promise is not None:
            self._index.fulfil(sent.promise)
            sent.promise = None

    def on_tokens(self, replica: Replica, events: Sequence[Event], now: float) -> Sequence[Event]:
        """Account for the events of a message; returns those of requests that are not at another replica now."""
        made: list[Progress] = []
        moved: list[Event] = []
        for event in events:
            sent = self._sent.get(event.request_id)
            if sent is None or sent.replica is not replica:
                moved += [event] if sent is not None else []
                continue
            if not sent.started:
                sent.started = True
                self._fulfil(sent)
                replica.answered += 1
                replica.predicted_s += sent.predicted
                replica.measured_s += now - sent.at
            tokens, ends = 0, 0
            if isinstance(event, TokenEvent):
                tokens, ends = int(event.token is not None), int(event.finish is not None)
            sent.tokens += tokens
            sent.choices -= ends
            if not sent.choices:
                del self._sent[event.request_id]
                mean = sent.tokens / sent.ask.choices
                self._output = OUTPUT_MEMORY * self._output + (1 - OUTPUT_MEMORY) * max(1.0, mean)
            made.append(Progress(event.request_id, tokens, ends))
        if replica.load is not None:
            replica.load.progress(made, now)
        return [event for event in events if event not in moved] if moved else events

    def on_accepted(self, replica: Replica, request_id: str) -> None:
        sent = self._sent.get(request_id)
        if sent is not None and sent.replica is replica and not sent.accepted:
            sent.accepted = True
            self.pending.accept(request_id)

    def on_refused(self, replica: Replica, request_id: str, error: ApiError) -> None:
        if (sent := self._sent.get(request_id)) is not None and sent.replica is not replica:
            return  # it has moved
        self._forget(request_id)
        self._abort(self.pending.fail(request_id, error))

    def on_end(self, replica: Replica, error: ApiError) -> None:
        """The process has ended. Its requests without a token go to others; the rest fail."""
        if self._index is not None:
            self._index.drop(replica.number)
        here = [sent for sent in self._sent.values() if sent.replica is replica]
        for sent in here:
            self._forget(sent.request.id)
        if replica.load is not None:
            replica.load.clear()
        for sent in here:
            if not sent.started and sent.moves < MOVES and any(r is not replica for r in self.serving):
                self._place(sent.request, sent.moves + 1, sent.accepted)
            else:
                self._abort(self.pending.fail(sent.request.id, error))

    def on_message(self, replica: Replica, message: Any) -> None:
        if isinstance(message, Ready):
            replica.on_ready(message)
            _log(f"replica {replica.number} ({replica.spec.name}): {replica.speed()}")
            self.ready = self.ready or message
            capacity = message.capacity
            if self._index is None and capacity is not None and capacity.groups:
                self._index = PrefixIndex(capacity.block_size, capacity.groups)
            if self._paths:
                self._run(self._load_again(replica))
        elif isinstance(message, CacheChanges):
            self._update_index(replica, message)
        processes = [r.process for r in self.serving if r.process is not None]
        self.adapters = dict(chain.from_iterable(process.adapters.items() for process in processes))

    def _update_index(self, replica: Replica, changes: CacheChanges) -> None:
        if self._index is not None and not self._index.update(replica.number, changes):
            assert replica.process is not None
            replica.process.send(GetIndex())

    # Calls that are not generations

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Encode texts at the replica that is predicted to finish first; at another one if it dies meanwhile."""
        for attempt in range(MOVES + 1):
            self.require_ready()
            ask = Ask(f"embed-{next(self._embeds)}", sum(map(len, texts)), 1)
            candidates = [Candidate(r.number, r.load, 0) for r in self._able(time.perf_counter()) if r.load is not None]
            replica = self.replicas[self.router.choose(candidates, ask, time.perf_counter()).number]
            assert replica.load is not None and replica.process is not None
            replica.load.add(ask, 0, time.perf_counter())
            try:
                vectors = await replica.process.embed(texts)
                replica.load.progress([Progress(ask.id, 1, 1)], time.perf_counter())
                return vectors
            except ApiError as error:
                if error.code != "engine_died" or attempt == MOVES:
                    raise
            finally:
                replica.load.remove(ask.id)
        raise AssertionError("the loop returns or raises")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter at all replicas, or at none."""
        self.require_ready()
        processes = [r.process for r in self.serving if r.process is not None]
        found = await asyncio.gather(*(p.load_adapter(name, path) for p in processes), return_exceptions=True)
        errors = [error for error in found if isinstance(error, BaseException)]
        if errors:
            done = [p for p, error in zip(processes, found, strict=True) if error is None]
            await asyncio.gather(*(p.unload_adapter(name) for p in done), return_exceptions=True)
            raise errors[0]
        self._paths[name] = path

    async def unload_adapter(self, name: str) -> None:
        self.require_ready()
        self._paths.pop(name, None)
        processes = [r.process for r in self.serving if r.process is not None and name in r.process.adapters]
        await asyncio.gather(*(p.unload_adapter(name) for p in processes or [self._any()]))

    async def _load_again(self, replica: Replica) -> None:
        """Load the adapters of requests at a replica that has started later than they were loaded."""
        for name, path in list(self._paths.items()):
            assert replica.process is not None
            try:
                await replica.process.load_adapter(name, path)
            except ApiError as error:
                _log(f"replica {replica.number} has no adapter {name!r}: {error}")

    def _any(self) -> Any:
        return next(r.process for r in self.serving)

    async def stats(self) -> EngineStats | None:
        """The sums over the replicas; of the last step the longest."""
        processes = [r.process for r in self.serving if r.process is not None]
        found = [s for s in await asyncio.gather(*(p.stats() for p in processes)) if s is not None]
        return summed(found) if found else None

    def describe(self) -> list[dict[str, Any]]:
        """The replicas, for /health."""
        return [replica.describe() for replica in self.replicas]

    def metrics(self) -> Iterator[str]:
        """The lines of /metrics that are about replicas."""
        return replica_metrics(self.replicas, self.pending.metrics.names, time.perf_counter())


def _log(message: str) -> None:
    print(f"bagu serve: {message}", file=sys.stderr, flush=True)
