"""Which replica gets a request.

    finish   the one where it is predicted to finish first (load.py): the default
    p2c      of two drawn at random the one with fewer open choices, as in Ray Serve
    queue    the one with the fewest open choices
    rr       each in turn

The last three know neither speed nor cache, and stand here to be compared with the first. A prediction needs no
threshold between "has the prefix" and "is less busy": tokens that are cached are prefill that is not predicted, and a
queue is a wait that is. So a prefix that all requests share spreads over the replicas as soon as waiting for the one
that has it costs more than computing it again.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from bagu.errors import UnknownName
from bagu.serve.replicas.load import Ask, Forecast, ReplicaLoad

POLICIES = ("finish", "p2c", "queue", "rr")
SAME = 1.02  # predictions that differ by less are equal, and idle replicas of one speed take turns


class Candidate(NamedTuple):
    """A replica that may get the request, and the tokens of its prompt that are cached there."""

    number: int
    load: ReplicaLoad
    cached: int


class Choice(NamedTuple):
    number: int
    cached: int
    forecast: Forecast


class Router:
    def __init__(self, policy: str = "finish", seed: int = 0) -> None:
        UnknownName.check("router", policy, POLICIES)
        self.policy, self._random, self._turn = policy, Random(seed), 0

    def choose(self, candidates: Sequence[Candidate], ask: Ask, now: float) -> Choice:
        """One of the candidates, of which there is at least one, with its forecast."""
        if self.policy == "finish":
            forecasts = [(c.load.forecast(ask, c.cached, now), c) for c in candidates]
            most = SAME * min(forecast.finish for forecast, _ in forecasts)
            equal = [(f, c) for f, c in forecasts if f.finish <= most]
            forecast, found = min(equal, key=lambda each: (each[1].load.given, each[1].number))
            return Choice(found.number, found.cached, forecast)
        if self.policy == "rr":
            self._turn += 1
            found = candidates[self._turn % len(candidates)]
        elif self.policy == "p2c" and len(candidates) > 1:
            found = min(self._random.sample(list(candidates), 2), key=lambda c: c.load.choices)
        else:
            found = min(candidates, key=lambda c: (c.load.choices, self._random.random()))
        return Choice(found.number, found.cached, found.load.forecast(ask, found.cached, now))
