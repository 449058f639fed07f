"""A run with a delay on servers: its bits are those of one process that computes with weights of the same ages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from bagu.train.served.config import ServedConfig
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


def alone(case: Case, workers: int, delay: int, *, own_ahead: bool) -> dict[str, torch.Tensor]:
    """The weights of the same run in one process: each worker's part at weights of `delay` updates before, with its
    own gradients since then, and with first moments of its own gradients alone."""
    made, data = tiny.model(case), tiny.loader(case.micro_batches)
    state = TrainState(made, tiny.config(case, alone=True))
    flat, optimizer = state.flat, state.optimizer
    held: list[list[torch.Tensor]] = []  # values and states after each update
    pushed: list[list[torch.Tensor]] = []  # gradients of each step, by worker
    first = [part.state[name] for part in optimizer.parts for name in ("velocity", "exp_avg") if name in part.state]
    own = [[[torch.zeros_like(row) for row in first]] for _ in range(workers)]  # first moments after each step

    def rows() -> list[torch.Tensor]:
        return [flat.master, *(t for part in optimizer.parts for t in part.state.values())]

    def put(to_rows: list[torch.Tensor], values: list[torch.Tensor]) -> None:
        for to, value in zip(to_rows, values, strict=True):
            to.copy_(value)

    def update(gradient: torch.Tensor, number: int) -> None:
        flat.grad.copy_(gradient)
        norm = float(gradient.norm())
        lr = state.config.optimizer.lr * factor(state.config.schedule, number - 1, case.steps)
        optimizer.update(lr=lr, step=number, scale=CLIP / norm if norm > CLIP else 1.0)

    with prepared(state.model, state.config, tiny.CPU):
        for t in range(1, case.steps + 1):
            held.append([row.clone() for row in rows()])
            version, batches, mine = max(0, t - 1 - delay), data.batch(t - 1), list[torch.Tensor]()
            for worker in range(workers):
                put(rows(), held[version])
                put(first, own[worker][version] if own_ahead else first)
                for late in range(version + 1, t) if own_ahead else ():
                    update(workers * pushed[late - 1][worker], late)
                share = range(worker, len(batches), workers)
                run_backwards(state, batches, share, state.loss.totals(batches), ahead=t - 1)
                flat.finish()
                mine.append(flat.grad.clone())
                put(first, own[worker][-1])
                update(workers * mine[-1], t)
                own[worker].append([row.clone() for row in first])
            pushed.append(mine)
            put(rows(), held[-1])
            update(torch.stack(mine).sum(0), t)
    return {name: value.detach().clone() for name, value in made.state_dict().items()}


@pytest.mark.parametrize("own_ahead", [True, False])
@pytest.mark.parametrize(("kind", "delay"), [("adamw", 3), ("momentum", 1)])
def test_a_delay_has_the_bits_of_one_process_with_these_ages(
    kind: str, delay: int, own_ahead: bool, group: Local, oldest: None
) -> None:
    case = Case(name="", optimizer={"kind": kind}, steps=STEPS, micro_batches=2, options={"clip": CLIP})
    weights = alone(case, 2, delay, own_ahead=own_ahead)
    found = run(case, group, ServedConfig(servers=3, workers=2, delay=delay, own_ahead=own_ahead))
    assert max(float((weights[n] - found[0][1][n]).abs().max()) for n in weights) < 1e-10
    assert [row["read_age_updates"] for row in found[1][2]] == [min(t, delay) for t in range(STEPS)]


def test_one_worker_with_a_delay_equals_the_run_without(group: Local, oldest: None) -> None:
    """All updates in flight are its own, so it reads what the servers will have."""
    case = Case(name="", steps=STEPS, micro_batches=2)
    losses, weights = tiny.run(case, alone=True)
    found = run(case, group, ServedConfig(servers=3, workers=1, delay=4))
    assert np.allclose(found[0][0], losses, rtol=1e-10, atol=0)
    assert max(float((weights[n] - found[0][1][n]).abs().max()) for n in weights) < 1e-10


def test_states_come_with_the_values_only_where_a_delay_needs_them(group: Local) -> None:
    case = Case(name="", steps=6, micro_batches=2)
    found: dict[int, Any] = run(case, group, ServedConfig(servers=3, workers=2, delay=2, own_ahead=False))
    size = len(found[0][3].flat.master) * 8
    assert sum(row["pulled_bytes"] for row in found[0][2]) <= 7 * size  # values alone: at most one read a step


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
