"""Optimizers: the family of `bagu.train.optim` and Newton's method, in steps, in time and in memory.

    first order   θ ← θ - η · rule(g)          state: 0 to 2 numbers a parameter
    Newton        θ ← θ - H⁻¹ g                state: the Hessian H, n numbers a parameter; n backward passes a step
    damped        θ ← θ - (|H| + μI)⁻¹ g       |H|: away from saddles (https://arxiv.org/abs/1406.2572); μ grows until
                                               the loss falls (Levenberg, Marquardt)

A quadratic with its eigenvalues spread over a condition number κ, Rosenbrock's valley, and a small network that guesses
the next letter of the standard library's text from the last two, on a fixed set of windows: all without noise, where
Newton's method is at its best. Weight decay is 0 for all, so that all minimise the same function; AdamW then is Adam
with other betas. A step of Newton's method is one Hessian, whatever tries of μ it takes.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from bagu import ops
from bagu.data import StdlibSource
from bagu.device import available_memory
from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import INK, log_ticks
from bagu.nn.init import draw
from bagu.nn.linear import Linear
from bagu.nn.model import Transformer
from bagu.train.bench import SHAPES
from bagu.train.flat import FlatParameters, Role, roles
from bagu.train.optim import Optimizer, OptimizerConfig
from bagu.train.optim.config import Kind as Rule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DECADES = tuple(10.0**i for i in range(-4, 3))
SEARCH_SEED, SEEDS = 0, (1, 2, 3)
NEWTON = ("newton", "damped newton")
LARGE = SHAPES["cpu_6m"].model  # the model of `bagu demo`'s size
LETTERS, WINDOWS = 27, 512  # a to z and one for all else


class Quadratic(nn.Module):
    """½ θᵀAθ in 64 dimensions, eigenvalues from 1 down to 1/κ evenly in the logarithm, along random directions."""

    def __init__(self, condition: float, seed: int) -> None:
        super().__init__()
        size = 64
        eigenvalues = condition ** -torch.linspace(0, 1, size, dtype=torch.float64)
        axes = torch.linalg.qr(draw((size, size), "axes", seed).double()).Q
        self.register_buffer("A", ((axes * eigenvalues) @ axes.T).float())
        self.theta = nn.Parameter(draw((size,), "start", seed))
        self.target = 1e-4 * self().item()

    def forward(self) -> torch.Tensor:
        return 0.5 * self.theta @ (self.A @ self.theta)


class Rosenbrock(nn.Module):
    """(1 - x)² + 100 (y - x²)²: a curved valley, 2,500 times steeper across than along near its end at (1, 1)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        start = torch.tensor((-1.2, 1.0))  # the start that is always taken, and starts near it
        self.theta = nn.Parameter(start + 0.3 * draw((2,), "start", seed))
        self.target = 1e-3

    def forward(self) -> torch.Tensor:
        x, y = self.theta
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2


class NextLetter(nn.Module):
    """Embedding, linear, GELU, linear: 27 letters from the last two. The loss is the mean over all windows, in nats."""

    def __init__(self, letters: torch.Tensor, seed: int, *, embedding: int = 3, hidden: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(LETTERS, embedding))
        self.up = Linear(2 * embedding, hidden, bias=True)
        self.down = Linear(hidden, LETTERS, bias=True)
        self.register_buffer("windows", letters.unfold(0, 3, 1)[:WINDOWS])
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(draw(p.shape, name, seed) * (1 if name == "embedding" else p.shape[-1] ** -0.5))
        self.target = 2.0

    def forward(self) -> torch.Tensor:
        seen = self.embedding[self.windows[:, :2]].flatten(1)
        return ops.cross_entropy(self.down(ops.gelu(self.up(seen))), self.windows[:, 2]).mean()


def letters() -> torch.Tensor:
    """The first letters of the built-in corpus; runs of anything else are one space."""
    found: list[str] = []
    for document in StdlibSource().documents():
        found += re.sub("[^a-z]+", " ", document.text.lower())
        if len(found) > WINDOWS + 2:
            break
    return torch.tensor([0 if letter == " " else ord(letter) - ord("a") + 1 for letter in found])


@dataclass(frozen=True, kw_only=True)
class Descent:
    """How a run went: updates until the loss was first at the target (None: it was not), and a step's median time."""

    steps: int | None
    step_s: float


def first_order(problem: nn.Module, kind: Rule, lr: float, budget: int) -> Descent:
    """Updates with the trainer's own optimizer, at a constant learning rate."""
    flat = FlatParameters(problem)
    optimizer = Optimizer(OptimizerConfig(kind=kind, lr=lr, weight_decay=0.0), flat)

    def update(step: int, loss: torch.Tensor) -> None:
        flat.begin()
        loss.backward()
        flat.finish()
        optimizer.update(lr=lr, step=step)

    done = descend(problem, update, budget)
    flat.release()
    return done


def newton(problem: nn.Module, budget: int, *, damped: bool) -> Descent:
    """Newton's method as it stands in a textbook; or damped, with the size of each curvature instead of its sign."""
    parameters = list(problem.parameters())
    damping = 1e-3

    def update(step: int, loss: torch.Tensor) -> None:
        nonlocal damping
        g, H = gradient_and_hessian(loss, parameters)
        curvatures, axes = torch.linalg.eigh(H)
        along, start = axes.T @ g, nn.utils.parameters_to_vector(parameters).detach()
        if not damped:
            nn.utils.vector_to_parameters(start - (axes @ (along / curvatures)).float(), parameters)
            return
        while damping < 1e12:
            move = axes @ (along / (curvatures.abs() + damping))
            nn.utils.vector_to_parameters(start - move.float(), parameters)
            with torch.no_grad():
                fell = problem() < loss
            damping = damping / 10 if fell else damping * 10
            if fell:
                return

    return descend(problem, update, budget)


def descend(problem: nn.Module, update: Callable[[int, torch.Tensor], None], budget: int) -> Descent:
    times = [math.inf]
    for step in range(1, budget + 2):
        begin = time.perf_counter()
        loss = problem()
        value = loss.item()
        if value <= problem.target or not math.isfinite(value) or step > budget:
            break
        update(step, loss)
        times.append(time.perf_counter() - begin)
    steps = step - 1 if value <= problem.target else None
    return Descent(steps=steps, step_s=statistics.median_low(times))


def gradient_and_hessian(loss: torch.Tensor, parameters: list[nn.Parameter]) -> tuple[torch.Tensor, torch.Tensor]:
    """g[n] and H[n, n] in fp64, by one more backward pass for each entry of g."""
    g = flatten(torch.autograd.grad(loss, parameters, create_graph=True))
    each = torch.eye(len(g))
    rows = torch.autograd.grad(g, parameters, each, is_grads_batched=True)
    return g.detach().double(), torch.cat([r.flatten(1) for r in rows], 1).double()


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors])

