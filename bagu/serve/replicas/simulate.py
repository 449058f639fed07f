"""Replicas under load, simulated: the router and the predictions of the server with replicas that only count time.

A simulated replica runs one request after the other (`slots` = 1 in load.py) at its own speed, which the router knows
or assumes to be `believed`. Prompts of one group begin with the same tokens, which a replica has cached while they are
among its last `room` groups. The result has the seconds to the first token and to the end of every request.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from bagu.parallel.unlike.profile import Step, StepCost
from bagu.serve.replicas.load import OUTPUT_MEMORY, Ask, Progress, ReplicaLoad
from bagu.serve.replicas.router import Candidate, Router
from bagu.serve.replicas.scale import BUSY_MEMORY, TICK_S, Scaler

PROMPT, OUTPUT = 1000, 16  # tokens of a request that takes 1 s at speed 1, on average
COST = StepCost(base=0.0, prompt=0.4 / PROMPT, decode=0.6 / OUTPUT)


class SimulatedRequest(NamedTuple):
    arrival: float
    prompt: int
    output: int
    group: int = 0  # prompts of one group share their first `shared` tokens
    shared: int = 0


class Outcome(NamedTuple):
    """What became of a request, in seconds after its arrival."""

    replica: int
    predicted: float  # to the first token
    first_token: float
    finish: float
    cached: int


@dataclass(kw_only=True)
class SimulatedReplica:
    cost: StepCost
    believed: StepCost | None = None  # what the router takes it for, at first
    room: int = 1 << 30  # groups whose prefix is cached
    load: ReplicaLoad = field(init=False)
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0

    def __post_init__(self) -> None:
        self.load = ReplicaLoad(self.believed or self.cost, slots=1, step_tokens=1 << 30)

    def cached(self, request: SimulatedRequest) -> int:
        return request.shared if request.group in self.cache else 0

    def run(self, request: SimulatedRequest, cached: int) -> tuple[float, float]:
        """When the first token comes, and the seconds between two tokens, if it is queued at its arrival."""
        self.cache[request.group] = None
        self.cache.move_to_end(request.group)
        while len(self.cache) > self.room:
            self.cache.popitem(last=False)
        begin = max(self.free_at, request.arrival)
        first = begin + self.cost.seconds(Step.of_prompt(max(1, request.prompt - cached), cached))
        step = self.cost.seconds(Step.of_decodes([request.prompt + request.output // 2]))
        self.free_at = first + max(0, request.output - 1) * step
        return first, step


Signal = Callable[
    [Sequence[ReplicaLoad], float, float], float
]  # of the ready replicas, mean output, now (`least_wait`)


class Scaling:
    """The number of replicas that take requests, by the server's `Scaler`. Replicas start in their order, which takes
    `start_s`, and the last one is stopped first. `signal` is what the scaler gets for the wait."""

    def __init__(self, scaler: Scaler, replicas: Sequence[SimulatedReplica], start_s: float, signal: Signal) -> None:
        self.scaler, self.replicas, self.start_s, self.signal = scaler, replicas, start_s, signal
        self.ready = scaler.least
        self.starts = 0
        self.next_tick = TICK_S
        self.paid = 0.0  # seconds of all replicas: starting, ready, and at work after they were stopped
        self._ready_at: float | None = None  # of the one that starts
        self._busy = 0.0

    def tick(self, output: float) -> None:
        now = self.next_tick
        self.next_tick += TICK_S
        if self._ready_at is not None and now >= self._ready_at:
            self._ready_at, self.ready = None, self.ready + 1
        loads = [replica.load for replica in self.replicas[: self.ready]]
        self._busy = BUSY_MEMORY * self._busy + (1 - BUSY_MEMORY) * sum(load.choices > 0 for load in loads)
        starting = int(self._ready_at is not None)
        draining = sum(replica.load.choices > 0 for replica in self.replicas[self.ready + starting :])
        self.paid += TICK_S * (self.ready + starting + draining)
        wait = self.signal(loads, output, now)
        change = self.scaler.decide(now, ready=self.ready, changing=starting + draining, wait_s=wait, busy=self._busy)
        if change == "grow":
            self._ready_at, self.starts = now + self.start_s, self.starts + 1
        elif change == "shrink":
            self.ready -= 1


def simulate(
    requests: Sequence[SimulatedRequest],
    replicas: Sequence[SimulatedReplica],
    policy: str | Router,
    *,
    seed: int = 0,
    observe: Callable[[float, Sequence[SimulatedReplica]], None] = lambda now, replicas: None,
    scaling: Scaling | None = None,
    output: float | None = None,
) -> list[Outcome]:
    """Route the requests, in the order of their arrival. `observe` is called after each is routed. With `output`, the
    router does not know the lengths of outputs: it takes the mean of the last ones, from this value on."""
    router, outcomes = policy if isinstance(policy, Router) else Router(policy, seed), list[Outcome]()
    ahead: list[tuple[float, int, int, Progress]] = []  # time, serial number, replica, what it reports then
    mean = output or 0.0
    for i, request in enumerate(requests):
        now = request.arrival
        while (when := min(ahead[0][0] if ahead else math.inf, scaling.next_tick if scaling else math.inf)) <= now:
            if scaling is not None and when == scaling.next_tick:
                scaling.tick(mean)
                continue
            _, serial, k, made = heapq.heappop(ahead)
            replicas[k].load.progress([made], when)
            if made.ended and output is not None:
                mean = OUTPUT_MEMORY * mean + (1 - OUTPUT_MEMORY) * requests[serial].output
        ask = Ask(str(i), request.prompt, request.output if output is None else max(1, round(mean)))
        able = replicas if scaling is None else replicas[: scaling.ready]
        choice = router.choose([Candidate(k, r.load, r.cached(request)) for k, r in enumerate(able)], ask, now)
        replica = replicas[choice.number]
        replica.load.add(ask, choice.cached, now)
        first, step = replica.run(request, choice.cached)
        for token in range(request.output):
            made = Progress(ask.id, 1, int(token == request.output - 1))
            heapq.heappush(ahead, (first + token * step, i, choice.number, made))
        finish = replica.free_at - now
        outcomes.append(Outcome(choice.number, choice.forecast.first_token, first - now, finish, choice.cached))
        observe(now, replicas)
    return outcomes


def poisson_requests(
    count: int, rate: float, *, seed: int = 0, spread: float = 0.8, groups: int = 0, shared: float = 0.0
) -> list[SimulatedRequest]:
    """`rate` requests a second that take 1 s at speed 1 on average. The size of a request is lognormal. `shared` is the
    part of every prompt that the prompts of its group begin with."""
    draw, now, found = Random(seed), 0.0, list[SimulatedRequest]()
    for _ in range(count):
        now += draw.expovariate(rate)
        size = math.exp(spread * draw.gauss(0, 1) - spread**2 / 2)
        prompt, output = max(2, round(PROMPT * size)), max(1, round(OUTPUT * size))
        group = draw.randrange(groups) if groups else 0
        found.append(SimulatedRequest(now, prompt, output, group, int(shared * prompt)))
    return found


def quantile(values: Sequence[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]
