"""Optimization runs, counted and timed: the trainer's optimizers, and Newton's method.

    first order   θ ← θ - η · rule(g)          state: 0 to 2 numbers per parameter
    Newton        θ ← θ - H⁻¹ g                state: the Hessian H, n numbers per parameter; n backwards per step
    damped        θ ← θ - (|H| + μI)⁻¹ g       |H|: moves away from saddles (https://arxiv.org/abs/1406.2572); μ grows
                                               until the loss decreases (Levenberg, Marquardt)

A step of Newton's method is one Hessian, for any number of tried μ.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from bagu.lab.train.optimizers.problems import Problem
from bagu.train.memory.flat import FlatParameters
from bagu.train.optim import Optimizer, OptimizerConfig
from bagu.train.optim.config import Kind as Rule

DECADES = range(-4, 3)  # learning rates to search: 1e-4, 1e-3, … 100
DIVERGED = 1e6  # a loss larger than the first by this factor counts as diverged


@dataclass(frozen=True, kw_only=True)
class Descent:
    """The result of a run: updates until the loss first reached the target (None: never), and the median step time."""

    steps: int | None
    step_s: float


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: the tensors are so small that more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def first_order(problem: Problem, kind: Rule, *, lr: float, budget: int) -> Descent:
    """At most `budget` updates with the trainer's optimizer, at a constant learning rate and without weight decay."""
    flat = FlatParameters(problem)
    optimizer = Optimizer(OptimizerConfig(kind=kind, lr=lr, weight_decay=0.0), flat)

    def update(step: int, loss: torch.Tensor) -> None:
        flat.begin()
        loss.backward()
        flat.finish()
        optimizer.update(lr=lr, step=step)

    done = _descend(problem, update, budget)
    flat.release()
    return done


def newton(problem: Problem, *, damped: bool, budget: int) -> Descent:
    """Newton's method as in a textbook; or damped, with the absolute value of each curvature."""
    parameters = list(problem.parameters())
    damping = 1e-3

    def update(_: int, loss: torch.Tensor) -> None:
        nonlocal damping
        g, H = gradient_and_hessian(loss, parameters)
        curvatures, axes = torch.linalg.eigh(H)
        start, along = nn.utils.parameters_to_vector(parameters).detach(), axes.T @ g
        if not damped:
            nn.utils.vector_to_parameters(start - (axes @ (along / curvatures)).float(), parameters)
            return
        fell = False
        while not fell and damping < 1e12:
            move = axes @ (along / (curvatures.abs() + damping))
            nn.utils.vector_to_parameters(start - move.float(), parameters)
            with torch.no_grad():
                fell = bool(problem() < loss)
            damping = damping / 10 if fell else damping * 10

    return _descend(problem, update, budget)


def gradient_and_hessian(loss: torch.Tensor, parameters: list[nn.Parameter]) -> tuple[torch.Tensor, torch.Tensor]:
    """g[n] and H[n, n] in fp64, with one more backward for each entry of g."""
    g = torch.cat([t.flatten() for t in torch.autograd.grad(loss, parameters, create_graph=True)])
    rows = torch.autograd.grad(g, parameters, torch.eye(len(g)), is_grads_batched=True)
    return g.detach().double(), torch.cat([r.flatten(1) for r in rows], 1).double()


def _descend(problem: Problem, update: Callable[[int, torch.Tensor], None], budget: int) -> Descent:
    times: list[float] = []
    first = math.nan
    for made in range(budget + 1):
        begin = time.perf_counter()
        loss = problem()
        value = loss.item()
        first = value if made == 0 else first
        arrived, lost = value <= problem.target, not value <= DIVERGED * first  # NaN counts as diverged
        if arrived or lost or made == budget:
            break
        update(made + 1, loss)
        times.append(time.perf_counter() - begin)
    return Descent(steps=made if arrived else None, step_s=statistics.median_low(times))


def best_lr(make: Callable[[], Problem], kind: Rule, *, budget: int, halves: bool) -> float | None:
    """The learning rate with the fewest steps: by decades, then with `halves` the half-decades next to the best one.

    A run stops when it has taken as many steps as the best one so far. None: no learning rate reaches the target.
    """
    best, fewest = None, budget + 1

    def attempt(lr: float) -> None:
        nonlocal best, fewest
        if fewest > 1:
            steps = first_order(make(), kind, lr=lr, budget=fewest - 1).steps
            best, fewest = (best, fewest) if steps is None else (lr, steps)

    for decade in DECADES:
        attempt(10.0**decade)
    if halves and best is not None:
        for lr in (best / math.sqrt(10), best * math.sqrt(10)):
            attempt(lr)
    return best
