"""The work that a replica was given and has not finished, and how long more work would take there.

    finish = wait + prefill of the tokens that are not cached + decode

A replica batches: up to `slots` choices run, and every step computes a token of each. So below `slots` a new request
waits for the prompts before it only; above, for as many requests to end as stand before it. All times are the fitted
cost of a step (parallel/unlike/profile.py) times the correction measured here: the seconds that the replica was busy
over those that its finished work should have taken. No clock is read and nothing is sent: the caller passes times in,
so a simulation (simulate.py) runs the same code as the server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bagu.parallel.unlike.profile import Correction, Step, StepCost

OUTPUT_MEMORY = 0.9  # weight of the answers before in the mean output, which is expected of the next request
PIECE_S = 0.25  # the correction is updated this often, and when a request ends


class Ask(NamedTuple):
    """A request as the router sees it."""

    id: str
    prompt: int  # tokens
    output: int  # tokens expected, of one choice
    choices: int = 1


class Progress(NamedTuple):
    """New tokens of a request, and how many of its choices have ended."""

    id: str
    tokens: int
    ended: int


class Forecast(NamedTuple):
    """Predicted seconds of a request at a replica."""

    wait: float
    prefill: float
    decode: float

    @property
    def first_token(self) -> float:
        return self.wait + self.prefill

    @property
    def finish(self) -> float:
        return self.wait + self.prefill + self.decode


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    ask: Ask
    left: int  # decoded tokens expected
    choices: int
    started: bool = False


class ReplicaLoad:
    def __init__(self, cost: StepCost, *, slots: int, step_tokens: int) -> None:
        self.cost, self.slots, self.step_tokens = cost, slots, step_tokens
        self.correction = Correction()
        self.given = 0  # requests so far
        self._open: dict[str, _Open] = {}
        self._unstarted: dict[str, float] = {}  # predicted seconds of prompts, without the correction
        self._choices = self._running = self._left = self._context = 0
        self._prefill = 0.0  # of the requests without a token
        self._mark = 0.0  # the last progress, or when the replica got work
        self._predicted = self._measured = 0.0  # seconds of work since the correction was updated

    @property
    def choices(self) -> int:
        """Choices that have not ended."""
        return self._choices

    def forecast(self, ask: Ask, cached: int, now: float) -> Forecast:
        """Runs for every replica and request, so the formula of a step (`StepCost.seconds`) is written out."""
        cost, n, slots = self.cost, self._choices, self.slots
        each = cost.decode + (self._context / n * cost.read if n else 0.0)  # of one more choice in a step
        batch = n if n < slots else slots
        step = cost.base + batch * each if n else 0.0
        wait = self._prefill + step  # below `slots` it joins the next step after the prompts before it
        if n >= slots:
            wait = max(wait, self._prefill + self._left / batch * step * (n - slots + 1) / n)
        new = max(1, ask.prompt - cached)
        chunks = -(-new // self.step_tokens)  # each step of the prompt has a token of the others that run, too
        attended = new * cached + new * (new + 1) // 2
        fixed = cost.base + cost.any_prompt + min(n, slots - 1) * each
        prefill = chunks * fixed + new * cost.prompt + attended * cost.attended
        others = min(n + ask.choices, slots) - 1
        own = cost.decode + (ask.prompt + ask.output // 2) * cost.read
        decode = max(0, ask.output - 1) * (cost.base + others * each + own)
        factor = self.correction.factor
        return Forecast(self._since(factor * wait, factor * each, now), factor * prefill, factor * decode)

    def next_step(self, each: float = 0.0) -> float:
        """Predicted seconds of a step with the first prompt that has no token, and what runs, `each` for a choice."""
        prompt = next(iter(self._unstarted.values()), 0.0)
        return self.correction.factor * (prompt + self.cost.base) + self._running * each

    def _since(self, wait: float, each: float, now: float) -> float:
        """The wait, less the time since the last progress. A replica that is silent for longer than its next step
        should take is stopped or overloaded: it is expected to be silent for as long again."""
        if not self._open:
            return 0.0
        due = self.next_step(each)
        silent = max(0.0, now - self._mark)
        return max(0.0, wait - silent) if silent <= due else wait + silent - due

    def _read(self, batch: int) -> int:
        """Positions that a step of this many choices attends to."""
        return self._context * batch // self._choices if self._choices else 0

    def add(self, ask: Ask, cached: int, now: float) -> None:
        if not self._open:
            self._mark = now
        prefill = self.cost.seconds(Step.of_prompt(max(1, ask.prompt - cached), cached))
        left = max(0, ask.output - 1) * ask.choices  # the first token comes with the prefill
        self._open[ask.id] = _Open(ask, left, ask.choices)
        self._unstarted[ask.id] = prefill
        self.given += 1
        self._choices += ask.choices
        self._left += left
        self._context += ask.prompt * ask.choices
        self._prefill += prefill

    def progress(self, made: Iterable[Progress], now: float) -> None:
        """Account for the tokens of a message: the work that they were, and the time since the last one."""
        tokens, running, ended, done = 0, self._running, 0, 0.0
        for id, count, ends in made:
            if (found := self._open.get(id)) is None:
                continue
            if not found.started:
                found.started = True
                done += self._begin(id)
                self._running += found.choices
                count -= 1  # the first token is the prefill's
            tokens += count
            less = min(found.left, count + ends * max(0, found.left - count) // max(1, found.choices))
            found.left -= less
            self._left -= less
            if ends:
                ended += 1
                self._end_choices(found, ends)
        if tokens > 0:
            batch = max(1, min(running, tokens))
            done += tokens / batch * self.cost.seconds(Step(0, batch, read=self._read(batch)))
        self._predicted += done
        self._measured += max(0.0, now - self._mark)
        self._mark = now
        if ended or self._measured > PIECE_S:
            self.correction.add(self._predicted, self._measured)
            self._predicted = self._measured = 0.0

    def remove(self, id: str) -> None:
        """A request ends without an event: it was aborted, or moved."""
        if (found := self._open.get(id)) is not None:
            self._end_choices(found, found.choices)

    def clear(self) -> None:
        """The process has ended; its correction stays, since the next one runs in its place."""
        for id in list(self._open):
            self.remove(id)
        self._predicted = self._measured = 0.0

    def _end_choices(self, found: _Open, count: int) -> None:
        self._choices -= count
        self._context -= found.ask.prompt * count
        found.choices -= count
        if found.started:
            self._running -= count
        if not found.choices:
            self._left -= found.left
            if not found.started:
                self._begin(found.ask.id)
            del self._open[found.ask.id]

    def _begin(self, id: str) -> float:
        """A request has its first token, or ends without one. Returns the predicted seconds of its prompt."""
        prefill = self._unstarted.pop(id)
        self._prefill = self._prefill - prefill if self._unstarted else 0.0  # no rest of rounding
        return prefill


def least_wait(loads: Sequence[ReplicaLoad], output: float, now: float) -> float:
    """Seconds until the prompt of a request that comes now would begin, at the replica where that is first."""
    ask = Ask("", 1, round(output))
    return min((load.forecast(ask, 0, now).wait for load in loads), default=0.0)
