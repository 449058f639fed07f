"""A worker of a run with a parameter server: the steps of `fit`, whose updates run on the servers.

A step is pushed (gradient and scalars), its total comes back when every worker has pushed it, every worker makes the
same decision from it (guard, clipping, learning rate), and the servers apply it once. With a delay, a worker pushes up
to that many further steps before the total of the first is there; results still come in the order of the steps.

Each decision carries the state of the run besides the weights, so a worker that is started again continues from the
servers: it redoes its part of the step that the others wait for.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bagu.errors import ArgumentError, BaguError
from bagu.parallel.server.client import Client
from bagu.train.loss import MicroBatch, Totals
from bagu.train.memory.flat import FlatParameters
from bagu.train.optim.config import OptimizerConfig
from bagu.train.optim.optimizer import options_of
from bagu.train.schedule import factor
from bagu.train.served.ahead import Ahead
from bagu.train.served.config import ServedConfig
from bagu.train.state import TrainState
from bagu.train.step import StepResult, idle_step, run_backwards, step, sums_of

Batches = Callable[[], Sequence[MicroBatch]]

# Shares of the time of a gradient. A worker that may be ahead still waits so long for the others' pushes, which brings
# workers of equal speed together, and for values of an update that is decided, which come soon: old ones cost loss.
SOON_TOTAL, SOON_VALUES = 0.03, 0.1
# A run with a delay begins without: AdamW's second moments settle in its first steps, and the loss falls fastest.
TOGETHER, MOST_TOGETHER = 20, 200  # one step in so many, and at most so many steps
JOIN_S = 60.0  # for an update that is decided to reach all ranges; another server may be starting


@dataclass(frozen=True, kw_only=True)
class ServedPlace:
    """Where a worker finds the servers, and which worker it is."""

    worker: int
    manager: tuple[str, int]
    token: str


@dataclass(frozen=True, kw_only=True)
class _Pushed:
    """A step that is on the servers and not decided."""

    totals: Totals
    names: list[str]  # of the metrics and the peaks that were pushed
    peaks: int
    age: int  # of the weights that it was computed with, in updates


class Served:
    """The worker at `place`. `fit` calls `begin`, `step` in its loop, `fetch` before it saves, and `close`."""

    def __init__(
        self, place: ServedPlace, config: ServedConfig, due: Callable[[int], bool] = lambda step: False
    ) -> None:
        self.place, self.config, self._due = place, config, due
        self.first = place.worker == 0
        self.stop = 0  # no step beyond it is pushed
        self._t = 0  # the last update that this worker decided
        self._flying: deque[_Pushed] = deque()
        self._held: Sequence[MicroBatch] | None = None  # of a step without tokens: it waits for the steps before
        self._client: Client | None = None
        self._version = 0
        self._together = 0  # updates at the start of a run that have no delay
        self._ahead: Ahead | None = None  # of a run with a delay: this worker has weights of its own
        self._begun = time.monotonic()
        self._last = (0, 0)

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    # --- the state ----------------------------------------------------------------------------------------------------

    def begin(self, state: TrainState) -> bool:
        """Give the servers the state of worker 0, or take theirs. Returns whether the run was already running."""
        flat = state.flat
        assert isinstance(flat, FlatParameters)
        segments = [(segment.start, segment.stop) for segment in flat.segments]
        dtype = np.dtype(str(flat.dtype).removeprefix("torch."))
        self._client = Client(
            self.place.worker,
            segments,
            self.config.servers,
            dtype,
            self.place.manager,
            self.place.token,
            method=self.config.compress,
        )
        self.client.wait_for_map()
        if self.config.delay and self.config.own_ahead:
            states = [row.numpy() for row in _state_rows(state)]
            self._ahead = Ahead(self.client, self._rule_of(state), states, self.config.workers)
            self._together = min(state.config.steps // TOGETHER, MOST_TOGETHER) - state.step
        if self.first and self.client.unloaded:
            self._load(state, 0)
        else:
            self.client.pull(0)
        decision = self.client.session.decision
        self._t = self.client.session.versions[0]
        joined = not self.first or self._t > 0
        if joined:
            if self._t > 0:  # other ranges may have missed this decision, if all workers died
                self.client.commit(self._t, decision, wait=False)
                self.client.wait_for_values(self._t, within=JOIN_S)
                if self.client.version < self._t:
                    raise BaguError(
                        f"a part of update {self._t} is lost: a worker and a server died before it was copied",
                        hint="bagu train --resume continues from the last checkpoint",
                    )
            self._read(state)
            load_facts(state, decision["facts"])
        self.client.waited_s, self._begun = 0.0, time.monotonic()
        return joined and self._t > 0

    def _load(self, state: TrainState, t: int) -> None:
        """Send the whole state as update t."""
        rows = [state.flat.master]
        if self._ahead is None:
            own = self.config.local_steps is None
            rows += _state_rows(state) if own else [torch.zeros_like(state.flat.master)]
        decision, rule = {"facts": facts_of(state)}, self._rule_of(state)
        self.client.load(t, [row.cpu().numpy() for row in rows], rule, self.config.workers, decision)

    def _rule_of(self, state: TrainState) -> dict[str, Any]:
        """The update of the servers, as data for parallel/server/rules.py."""
        outer = OptimizerConfig(kind="nesterov", lr=self.config.outer_lr, momentum=self.config.outer_momentum)
        rule = state.config.optimizer if self.config.local_steps is None else outer
        if self._ahead is not None:
            rule = OptimizerConfig(kind="sgd", lr=1.0, weight_decay=0.0)  # adds moves
        assert isinstance(state.flat, FlatParameters)
        segments = [[s.start, s.stop, options_of(rule, rule.kind, s.role)] for s in state.flat.segments]
        return {"kind": rule.kind, "servers": self.config.servers, "segments": segments}

    def restored(self, state: TrainState) -> None:
        """The run went back to a checkpoint, on every worker: the servers follow."""
        if self._flying:
            raise ArgumentError("a run with a delay cannot go back to a checkpoint", hint="resume it without --delay")
        self._t += 1
        if self.first:
            self._load(state, self._t)
        else:
            self.client.pull(self._t)
            self._read(state)
            load_facts(state, self.client.session.decision["facts"])

    def fetch(self, state: TrainState) -> None:
        """Bring the optimizer's state from the servers, for a checkpoint. All updates that were pushed are decided."""
        if self.config.local_steps is None and self._t:
            self._catch_up(state)
            rows = [row.numpy() for row in _state_rows(state)]
            if self._ahead is not None:
                self._ahead.states(rows)
            else:
                self.client.memory(self._t, [np.empty_like(state.flat.master.numpy()), *rows])
            _put_state_rows(state, rows)

    def _catch_up(self, state: TrainState) -> None:
        """Have the values after the last update that was decided."""
        if self._asked < self._t and self.client.version < self._t:
            self.client.pull(self._t)
        self.client.wait_for_values(self._t)
        if self.client.version > self._version or self._ahead is not None:
            self._read(state)

    def _read(self, state: TrainState) -> None:
        """Bring the values that came last into the model."""
        self._version = self.client.read(_array(state.flat.master))
        state.publish()

    def _approach(self, state: TrainState) -> None:
        """Bring the weights for a gradient into the model."""
        if self._ahead is not None:
            self._version = self._ahead.approach(_array(state.flat.master), self.delay)
            state.publish()
        elif self.client.version > self._version:
            self._read(state)

    def _move(self, state: TrainState, t: int, ahead: int, norm: float) -> np.ndarray:
        """Make this worker's move by its gradient, and return its part of update t as the servers subtract it."""
        assert self._ahead is not None
        config, whole = state.config, norm * self.config.workers
        clipped = config.clip / whole if config.clip is not None and whole > config.clip else 1.0
        lr = config.optimizer.lr * factor(config.schedule, state.step + ahead, config.steps)
        own = {"lr": lr, "step": state.updates + ahead + 1, "scale": self.config.workers * clipped}
        at, gradient = _array(state.flat.master), _array(state.flat.grad)
        move = self._ahead.move(t, at, gradient, own if math.isfinite(norm) else None)
        return move / -self.config.workers

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self, state: TrainState, batches: Batches) -> StepResult:
        """The result of the next step, in order. With a delay, the values after it are read when they are there; a
        step after which the model is used waits for them."""
        if self.config.local_steps is not None:
            return self._local_step(state, batches())
        result = self._next(state, batches)
        last = state.step >= self.stop or state.stop_asked or state.ended is not None
        if self.delay == 0 or last or self._due(state.step):
            self._catch_up(state)
        return result

    @property
    def delay(self) -> int:
        """How many updates this worker may be ahead; `bagu watch RUN --delay` changes it while the run runs."""
        if self._t < self._together:
            return 0
        return self.config.delay if self.client.delay is None else self.client.delay

    def _next(self, state: TrainState, batches: Batches) -> StepResult:
        while True:
            ahead = len(self._flying)
            if ahead and self.client.total(self._t + 1, within=SOON_TOTAL * self._seconds) is not None:
                return self._decide(state)
            step = state.step + ahead
            if self._held is not None or ahead > self.delay or step >= self.stop or (ahead and self._due(step)):
                if not ahead and self._held is not None:
                    held, self._held = self._held, None
                    return idle_step(state, state.loss.totals(held), state.lr)
                return self._decide(state)
            found = batches()
            if state.loss.totals(found).idle:
                self._held = found
            else:
                self._push(state, found, ahead)

    def _push(self, state: TrainState, batches: Sequence[MicroBatch], ahead: int) -> None:
        mine = range(self.place.worker, len(batches), self.config.workers)
        totals = state.loss.totals(batches)
        t = self._t + ahead + 1
        self.client.wait_for_values(t - 1 - self.delay)  # no older ones are used
        self.client.wait_for_values(self._asked, within=SOON_VALUES * self._seconds)
        begun = time.monotonic()
        self._approach(state)
        parts = run_backwards(state, batches, mine, totals, ahead=ahead)
        if parts[0].expert_load:
            raise ArgumentError(
                "a mixture of experts with a balance bias cannot be trained on parameter servers", hint="use --nproc"
            )
        norm = float(state.flat.finish())
        sums, largest = sums_of(parts)
        values = torch.stack([*sums, *largest]).double().tolist()
        row = [norm, *values, float(state.stop_asked)]
        pushed = _array(state.flat.grad) if self._ahead is None else self._move(state, t, ahead, norm)
        self._seconds = time.monotonic() - begun
        self.client.push(t, pushed, row)
        names = [*parts[0].metrics, *parts[0].peaks]
        self._flying.append(_Pushed(totals=totals, names=names, peaks=len(largest), age=t - 1 - self._version))

    def _decide(self, state: TrainState) -> StepResult:
        """Decide the next update by the sums of all workers, and read the values after it."""
        total = self.client.total(self._t + 1)
        assert total is not None
        pushed, self._t, lr = self._flying.popleft(), self._t + 1, state.lr
        table, tops = np.array(total.rows), pushed.peaks + 1
        added, most = table[:, :-tops].sum(0).tolist(), table[:, -tops:].max(0).tolist()
        state.stop_asked = most.pop() > 0
        norms, loss, *sums = added
        # of moves there is no gradient: the mean of what the workers take for its norm
        norm = float(np.sqrt(total.square)) if self._ahead is None else norms
        metrics = state.loss.metrics(loss, dict(zip(pushed.names, [*sums, *most], strict=True)), pushed.totals)
        skipped = state.guard.judge(loss, norm)
        clip = state.config.clip if self._ahead is None else None
        if skipped is None:
            state.updates += 1
            state.step += 1
            state.loss.updated(metrics)
            state.loss.stepped(metrics)
        elif self._ahead is not None:
            self._ahead.refuse(self._t, _array(state.flat.master))
        state.data_step += 1
        decision = {
            "skip": skipped is not None,
            "lr": lr if self._ahead is None else 1.0,
            "step": state.updates,
            "facts": facts_of(state),
            "scale": clip / norm if clip is not None and norm > clip else 1.0,
        }
        more = bool(self._flying) and self.client.total(self._t + 1, within=0) is not None
        self.client.commit(self._t, decision, pull=not more, wait=False)  # of several that are ready, the last reads
        self._asked = self._asked if more else self._t
        self._age = pushed.age
        self.client.clock = {
            "pid": os.getpid(),
            "step": state.step,
            "age": pushed.age,
            "waited_s": round(self.client.waited_s, 3),
        }
        return StepResult(loss=loss, metrics=metrics, grad_norm=norm, lr=lr, totals=pushed.totals, skipped=skipped)

    def _local_step(self, state: TrainState, batches: Sequence[MicroBatch]) -> StepResult:
        """A step of this worker alone, on its share; after `local_steps` of them the servers take the mean."""
        if self._start is None:
            self._start = state.flat.master.clone()
        result = step(state, batches[self.place.worker :: self.config.workers])
        asked, state.stop_asked = state.stop_asked, False  # workers stop together, at an exchange
        assert self.config.local_steps is not None
        if result.skipped is None and (state.step % self.config.local_steps == 0 or state.step == self.stop):
            difference = (self._start - state.flat.master) / self.config.workers
            self._t += 1
            self.client.push(self._t, _array(difference), [float(asked)])
            total = self.client.total(self._t)
            assert total is not None
            state.stop_asked = max(row[0] for row in total.rows) > 0
            decision = {
                "skip": False,
                "lr": self.config.outer_lr,
                "scale": 1.0,
                "step": self._t,
                "facts": facts_of(state),
            }
            self.client.commit(self._t, decision)
            self._read(state)
            self._start = state.flat.master.clone()
        return result

    _start: torch.Tensor | None = None
    _age = 0
    _asked = 0  # the newest version that was asked for
    _seconds = 0.0  # of the last gradient

    def row(self) -> dict[str, float | int | None]:
        """The metrics of the last step: how long this worker waited, how old its weights were, what it sent and got."""
        now, session = time.monotonic(), self.client.session
        sent, received = session.sent - self._last[0], session.received - self._last[1]
        idle = 100 * self.client.waited_s / max(1e-9, now - self._begun)
        self._last, self._begun, self.client.waited_s = (session.sent, session.received), now, 0.0
        return {"idle_percent": idle, "read_age_updates": self._age, "pushed_bytes": sent, "pulled_bytes": received}


def facts_of(state: TrainState) -> dict[str, Any]:
    """The state of a run besides the weights, as JSON."""
    return {
        "step": state.step,
        "data_step": state.data_step,
        "updates": state.updates,
        "guard": state.guard.state(),
        "best": state.best.state(),
        "loss": state.loss.state(),
    }


def load_facts(state: TrainState, facts: Mapping[str, Any]) -> None:
    state.step, state.data_step, state.updates = facts["step"], facts["data_step"], facts["updates"]
    state.guard.load(facts["guard"])
    state.best.load(facts["best"])
    state.loss.load_state(facts["loss"])


def _array(flat: torch.Tensor) -> np.ndarray:
    return flat.detach().cpu().numpy()


def _state_rows(state: TrainState) -> list[torch.Tensor]:
    """The optimizer's states as flat tensors: the segments one after the other."""
    names = state.optimizer.parts[0].state
    return [torch.cat([part.state[name] for part in state.optimizer.parts]).cpu() for name in names]


def _put_state_rows(state: TrainState, rows: Sequence[np.ndarray]) -> None:
    for name, row in zip(state.optimizer.parts[0].state, rows, strict=True):
        for part in state.optimizer.parts:
            part.state[name].copy_(torch.from_numpy(row[part.segment.start : part.segment.stop]))
