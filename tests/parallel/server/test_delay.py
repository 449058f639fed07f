"""A run with a delay on servers: its bits are those of one process that computes with weights of the same ages."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # tiny.py, as its neighbours import it
sys.path.insert(0, str(Path(__file__).parent))
import tiny
from test_training import Local, run
from tiny import Case

from bagu.parallel.server.client import Client
from bagu.train import TrainState
from bagu.train.prepare import prepared
from bagu.train.schedule import factor
from bagu.train.served.ahead import MEMORY, PULL
from bagu.train.served.config import ServedConfig
from bagu.train.served.worker import Served
from bagu.train.step import run_backwards

STEPS, CLIP = 14, 0.5


@pytest.fixture
def group() -> Iterator[Local]:
    made = Local(3)
    yield made
    made.close()


@pytest.fixture
def oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run ahead as far as they may: then every read of step t has version t - delay."""
    total = Client.total
    monkeypatch.setattr(Client, "total", lambda self, t, within=None: total(self, t) if within is None else None)


def in_step(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker reads before all can: a slow one that asks for the values of an update could get those of a later."""
    together, approach = threading.Barrier(workers), Served._approach

    def wait(self: Served, state: TrainState) -> None:
        together.wait(60)
        approach(self, state)

    monkeypatch.setattr(Served, "_approach", wait)


def alone(case: Case, workers: int, delay: int, *, own_ahead: bool) -> dict[str, torch.Tensor]:
    """The weights of the same run in one process. Each worker's gradient of a step is taken with weights of `delay`
    updates before, or with `own_ahead` at weights of its own, which approach those with its moves since then."""
    made, data = tiny.model(case), tiny.loader(case.micro_batches)
    state = TrainState(made, tiny.config(case, alone=True))
    flat, optimizer = state.flat, state.optimizer
    states = [row for part in optimizer.parts for row in part.state.values()]
    own = [[torch.zeros_like(row) for row in states] for _ in range(workers)]
    weights = [flat.master.clone() for _ in range(workers)]
    moves: list[list[torch.Tensor]] = [[] for _ in range(workers)]
    gradients: list[list[torch.Tensor]] = [[] for _ in range(workers)]
    values = [flat.master.clone()]  # after each update

    def faster(worker: int) -> float:
        """Of AdamW, which divides by more noise than a run without a delay: from all gradients of the worker."""
        pairs = list(pairwise(gradients[worker])) if case.optimizer["kind"] == "adamw" else []
        if not pairs:
            return 1.0
        weights = [MEMORY**i for i in reversed(range(len(pairs)))]
        product = sum(w * float(a @ b) for w, (a, b) in zip(weights, pairs, strict=True))
        square = sum(w * float(b @ b) for w, (_, b) in zip(weights, pairs, strict=True))
        return float((workers / (1 + (workers - 1) * min(max(product / square, 0), 1))) ** 0.5)

    def update(gradient: torch.Tensor, number: int, rate: float = 1.0) -> None:
        flat.grad.copy_(gradient)
        norm = float(gradient.norm())
        lr = state.config.optimizer.lr * factor(state.config.schedule, number - 1, case.steps)
        optimizer.update(lr=lr * rate, step=number, scale=CLIP / norm if norm > CLIP else 1.0)

    def gradient(at: torch.Tensor, worker: int, t: int) -> torch.Tensor:
        flat.master.copy_(at)
        batches = data.batch(t - 1)
        share = range(worker, len(batches), workers)
        run_backwards(state, batches, share, state.loss.totals(batches), ahead=t - 1)
        flat.finish()
        return flat.grad.clone()

    def move(worker: int, t: int) -> torch.Tensor:
        version = max(0, t - 1 - delay)
        there = values[version] + sum(moves[worker][version:], torch.zeros(()))
        at = weights[worker] + PULL * (there - weights[worker])
        found = gradient(at, worker, t)
        gradients[worker].append(found)
        for row, mine in zip(states, own[worker], strict=True):
            row.copy_(mine)
        update(workers * found, t, faster(worker))
        own[worker], weights[worker] = [row.clone() for row in states], flat.master.clone()
        return weights[worker] - at

    with prepared(state.model, state.config, tiny.CPU):
        for t in range(1, case.steps + 1):
            if own_ahead:
                for worker in range(workers):
                    moves[worker].append(move(worker, t))
                values.append(values[-1] + sum(m[-1] for m in moves) / workers)
            else:
                parts = [gradient(values[max(0, t - 1 - delay)], worker, t) for worker in range(workers)]
                flat.master.copy_(values[-1])
                update(torch.stack(parts).sum(0), t)
                values.append(flat.master.clone())
    flat.master.copy_(values[-1])
    return {name: value.detach().clone() for name, value in made.state_dict().items()}


def test_a_run_begins_without_a_delay(group: Local, oldest: None) -> None:
    """One step in twenty; after a resume at a later step there are none."""
    case = Case(name="", optimizer={"kind": "adamw"}, steps=60, micro_batches=2)
    found = run(case, group, ServedConfig(servers=3, workers=2, delay=2))
    ages = [row["read_age_updates"] for row in found[0][2]]
    assert ages[:3] == [0, 0, 0] and max(ages) == 2


@pytest.mark.parametrize("own_ahead", [True, False])
@pytest.mark.parametrize(("kind", "delay"), [("adamw", 3), ("momentum", 1)])
def test_a_delay_has_the_bits_of_one_process_with_these_ages(
    kind: str, delay: int, own_ahead: bool, group: Local, oldest: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_step(2, monkeypatch)
    case = Case(name="", optimizer={"kind": kind}, steps=STEPS, micro_batches=2, options={"clip": CLIP})
    weights = alone(case, 2, delay, own_ahead=own_ahead)
    found = run(case, group, ServedConfig(servers=3, workers=2, delay=delay, own_ahead=own_ahead))
    assert max(float((weights[n] - found[0][1][n]).abs().max()) for n in weights) < 1e-10
    assert [row["read_age_updates"] for row in found[1][2]] == [min(t, delay) for t in range(STEPS)]


def test_one_worker_with_a_delay_equals_the_run_without(group: Local, oldest: None) -> None:
    """All updates in flight are its own, so its weights are what the servers will have."""
    case = Case(name="", steps=STEPS, micro_batches=2)
    losses, weights = tiny.run(case, alone=True)
    found = run(case, group, ServedConfig(servers=3, workers=1, delay=4))
    assert np.allclose(found[0][0], losses, rtol=1e-10, atol=0)
    assert max(float((weights[n] - found[0][1][n]).abs().max()) for n in weights) < 1e-10


def largest_stable(delay: int, beta: float) -> float:
    """The largest rate × curvature k at which m ← βm + (1-β) k x(t - delay), x ← x - m does not grow."""
    low, high = 1e-3, 1e3
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        matrix = np.zeros((delay + 2, delay + 2))  # of (m, x(t), …, x(t - delay))
        matrix[0, 0], matrix[0, 1 + delay] = beta, (1 - beta) * middle
        matrix[1] = -matrix[0]
        matrix[1, 1] += 1
        matrix[2:, 1:-1] += np.eye(delay)
        stable = max(abs(np.linalg.eigvals(matrix))) <= 1 + 1e-9
        low, high = (middle, high) if stable else (low, middle)
    return low


def test_momentum_makes_old_gradients_unstable() -> None:
    """What docs and ahead.py say."""
    assert np.allclose([largest_stable(d, 0.9) for d in range(5)], [38, 1, 0.512, 0.348, 0.265], rtol=2e-3)
