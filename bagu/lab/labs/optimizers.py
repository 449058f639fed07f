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
from functools import partial
from typing import TYPE_CHECKING, get_args

import torch
from torch import nn

from bagu import ops
from bagu.data import StdlibSource
from bagu.device import available_memory
from bagu.lab.core import Kind, Lab, Row, Setting, Verdict, number
from bagu.lab.plot import INK, log_ticks
from bagu.nn import count
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

DECADES = range(-4, 3)  # learning rates are searched among 1e-4, 1e-3, … 100
SEARCH_SEED, SEEDS = 0, (1, 2, 3)
NEWTON = ("newton", "damped newton")
NEWTON_BUDGET = 60
DASHES, MARKERS = ("-", "--"), "osD^vP"
DIVERGED = 1e6  # a loss so many times the first one does not come back
LARGE = SHAPES["cpu_6m"].model  # what a laptop trains in minutes
LETTERS, WINDOWS = 27, 256  # a to z and one for all else


class Problem(nn.Module):
    """Called without arguments it gives the loss, which is to come down to `target`."""

    target: float


class Quadratic(Problem):
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


class Rosenbrock(Problem):
    """(1 - x)² + 100 (y - x²)²: a curved valley, 2,500 times steeper across than along near its end at (1, 1)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        start = torch.tensor((-1.2, 1.0))  # the start that is always taken, and starts near it
        self.theta = nn.Parameter(start + 0.3 * draw((2,), "start", seed))
        self.target = 1e-3

    def forward(self) -> torch.Tensor:
        x, y = self.theta
        return (1 - x) ** 2 + 100 * (y - x**2) ** 2


class NextLetter(Problem):
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
        self.target = 1.7

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


def first_order(problem: Problem, kind: Rule, lr: float, budget: int) -> Descent:
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


def newton(problem: Problem, budget: int, *, damped: bool) -> Descent:
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


def descend(problem: Problem, update: Callable[[int, torch.Tensor], None], budget: int) -> Descent:
    times, limit = [math.inf], 0.0
    for step in range(1, budget + 2):
        begin = time.perf_counter()
        loss = problem()
        value = loss.item()
        limit = limit or DIVERGED * value
        if value <= problem.target or step > budget or not value <= limit:  # which a NaN is not either
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, to be made with any seed, and how many first-order updates it may take."""

    name: str
    make: Callable[[int], Problem]
    budget: int
    condition: float | None = None


def cases(setting: Setting) -> list[Case]:
    quick = setting.quick
    conditions = (1, 10_000) if quick else (1, 10, 100, 1_000, 10_000)
    return [
        *(
            Case(name="quadratic", make=partial(Quadratic, c), budget=300 if quick else 2000, condition=c)
            for c in conditions
        ),
        Case(name="Rosenbrock", make=Rosenbrock, budget=300 if quick else 3000),
        Case(name="network", make=partial(NextLetter, letters()), budget=60 if quick else 300),
    ]


def run(setting: Setting) -> list[Row]:
    points: list[tuple[Case, str]] = []
    for case in cases(setting):
        has_matrix = Role.MATRIX in roles(case.make(SEARCH_SEED)).values()
        points += [(case, name) for name in (*get_args(Rule), *NEWTON) if name != "muon" or has_matrix]
    return [point(case, name, setting) for case, name in setting.track(points)]


def point(case: Case, name: str, setting: Setting) -> Row:
    """One optimizer on one problem. The learning rate is chosen with one seed, and the rest measured with others."""
    seeds = SEEDS[:1] if setting.quick else SEEDS
    lr = None
    if name in NEWTON:
        descend_from = partial(newton, budget=NEWTON_BUDGET, damped=name != "newton")
        newton(case.make(SEARCH_SEED), 1, damped=True)  # the first call is slow
    else:
        lr = search(case, name, halves=not setting.quick)
        descend_from = partial(first_order, kind=name, lr=lr or 0.0, budget=case.budget if lr else 20)
    runs = [descend_from(case.make(seed)) for seed in seeds]
    reached = [done.steps for done in runs if done.steps is not None]
    steps = statistics.median_low(reached) if len(reached) == len(runs) else None
    step_s = statistics.median_low([done.step_s for done in runs])
    return {
        "problem": case.name,
        "condition": case.condition,
        "optimizer": name,
        "parameters": sum(p.numel() for p in case.make(SEARCH_SEED).parameters()),
        "lr": lr,
        "seeds": len(seeds),
        "seeds_at_target": len(reached),
        "steps": steps,
        "steps_min": min(reached, default=None),
        "steps_max": max(reached, default=None),
        "step_us": step_s * 1e6,
        "time_ms": None if steps is None else steps * step_s * 1e3,
        "large_model_parameters": count.parameters(LARGE).total,
        "large_model_state_bytes": large_state_bytes(name),
        "memory_available_bytes": available_memory(),
    }


def search(case: Case, kind: Rule, *, halves: bool) -> float | None:
    """The learning rate with the fewest steps to the target: by decades, then the half-decades beside the best one.

    A learning rate is given up once it has taken as many steps as the best before it. None: no one gets there.
    """
    best, fewest = None, case.budget + 1

    def attempt(lr: float) -> None:
        nonlocal best, fewest
        done = first_order(case.make(SEARCH_SEED), kind, lr, fewest - 1)
        if done.steps is not None:
            best, fewest = lr, done.steps

    for decade in DECADES:
        attempt(10.0**decade)
    if halves and best is not None:
        for lr in (best / math.sqrt(10), best * math.sqrt(10)):
            attempt(lr)
    return best


def large_state_bytes(name: str) -> int:
    """What the optimizer would keep for the large model, beside parameters and gradients; fp32 throughout."""
    if name in NEWTON:
        return 4 * count.parameters(LARGE).total ** 2
    flat = FlatParameters(Transformer(LARGE, device="meta"))
    state = Optimizer(OptimizerConfig(kind=name), flat).tensors().values()
    return sum(t.numel() * t.element_size() for t in state)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The best on one problem: Newton's, plain or damped, and the first-order rules with fewest steps and least time."""

    label: str
    newton: Row | None
    fewest: Row | None
    fastest: Row | None

    @property
    def fewer_steps(self) -> bool:
        return less(self.newton, self.fewest, "steps")

    @property
    def replaces(self) -> bool:
        return self.fewer_steps and less(self.newton, self.fastest, "time_ms")


def less(a: Row | None, b: Row | None, key: str) -> bool:
    """Whether a has less; a problem that only one of them solves is that one's."""
    return a is not None and (b is None or number(a, key) < number(b, key))


def standings(rows: Sequence[Row]) -> list[Standing]:
    found = []
    for label in dict.fromkeys(map(labelled, rows)):
        solved = [row for row in rows if labelled(row) == label and row["steps"] is not None]
        second = [row for row in solved if row["optimizer"] in NEWTON]
        first = [row for row in solved if row["optimizer"] not in NEWTON]
        steps, time_ms = (partial(number, key=key) for key in ("steps", "time_ms"))
        found.append(
            Standing(
                label=label,
                newton=min(second, key=steps, default=None),
                fewest=min(first, key=steps, default=None),
                fastest=min(first, key=time_ms, default=None),
            )
        )
    return found


def labelled(row: Row) -> str:
    return str(row["problem"]) + ("" if row["condition"] is None else f" κ={row['condition']:,}")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held when Newton's method has fewer steps and less time on every problem, and its state for the large model fits."""
    every = standings(rows)
    fewer, replaces = [s for s in every if s.fewer_steps], [s for s in every if s.replaces]
    state = {str(row["optimizer"]): number(row, "large_model_state_bytes") for row in rows}
    free = rows[0]["memory_available_bytes"]
    fits = free is None or state["newton"] <= number(rows[0], "memory_available_bytes")
    kind: Kind
    if not replaces:
        kind = "did not hold"
    else:
        kind = "held" if fits and len(replaces) == len(every) else "holds only where"
    network = next(s for s in every if s.label == "network")
    plain = next(row for row in rows if row["problem"] == "network" and row["optimizer"] == "newton")
    size = number(plain, "large_model_parameters") / 1e6
    fails = "" if plain["steps"] is not None else " (undamped it does not get there)"
    fails_zh = "" if plain["steps"] is not None else "（不加阻尼则无法达到）"
    return Verdict(
        kind=kind,
        sentence_en=f"Newton's method takes the fewest steps on {names(fewer)}, and the least time as well on "
        f"{names(replaces)}. On the network of {plain['parameters']} parameters the best are {told(network.newton)}"
        f"{fails}, {told(network.fewest)} and {told(network.fastest)}. For {size:.1f}M parameters Adam's state is "
        f"{bytes_text(state['adam'])} and the Hessian {bytes_text(state['newton'])}, which "
        f"{'fits' if fits else 'does not fit'} here.",
        sentence_zh=f"牛顿法步数最少的问题：{names_zh(fewer)}；其中耗时也最短的：{names_zh(replaces)}。在 {plain['parameters']} "
        f"个参数的网络上，最好的是 {told_zh(network.newton)}{fails_zh}、{told_zh(network.fewest)} 和 "
        f"{told_zh(network.fastest)}。对 {size:.1f}M 参数的模型，Adam 的状态占 {bytes_text(state['adam'])}，"
        f"海森矩阵占 {bytes_text(state['newton'])}，本机内存{'放得下' if fits else '放不下'}。",
    )


def names(found: Sequence[Standing]) -> str:
    return ", ".join(s.label for s in found) or "no problem"


def names_zh(found: Sequence[Standing]) -> str:
    return "、".join(s.label for s in found) or "无"


def told(row: Row | None) -> str:
    if row is None:
        return "none"
    return f"{row['optimizer']} ({row['steps']} steps, {number(row, 'time_ms'):,.0f} ms)"


def told_zh(row: Row | None) -> str:
    return "无" if row is None else f"{row['optimizer']}（{row['steps']} 步，{number(row, 'time_ms'):,.0f} ms）"


def bytes_text(size: float) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.3g} {unit}"
    return f"{size:,.0f} bytes"


def plot(fig: Figure, rows: Sequence[Row]) -> None:
    """Steps over the condition number; then steps, time and memory, a line an optimizer."""
    left, *others = fig.subplots(1, 4, width_ratios=(1.5, 1, 1, 1))
    order = list(dict.fromkeys(str(row["optimizer"]) for row in reversed(rows)))
    for at, name in enumerate(reversed(order)):
        chosen = [row for row in rows if row["optimizer"] == name and row["problem"] == "quadratic" and row["steps"]]
        if chosen:
            style = (
                {"color": INK, "linestyle": "-" if name == "newton" else ":"}
                if name in NEWTON
                else {"linestyle": DASHES[at // 6]}
            )
            points = [(number(row, "condition"), number(row, "steps")) for row in chosen]
            left.plot(*zip(*points, strict=True), marker=MARKERS[at % 6], label=name, **style)
    left.set(xscale="log", yscale="log", xlabel="condition number κ", ylabel="steps", title="Steps on a quadratic")
    for axes, key, scale, unit in (
        (others[0], "steps", 1, "steps"),
        (others[1], "time_ms", 1, "ms"),
    ):
        for problem, marker in (("network", "o"), ("Rosenbrock", "D")):
            chosen = [row for row in rows if row["problem"] == problem and row[key] is not None]
            values = [number(row, key) for row in chosen]
            axes.plot(values, [order.index(str(row["optimizer"])) for row in chosen], marker, label=problem)
        axes.set(xscale="log", xlabel=unit, title=key)
    memory = {str(row["optimizer"]): number(row, "large_model_state_bytes") for row in rows}
    others[2].plot(list(memory.values()), [order.index(name) for name in memory], "s", color=INK)
    for axes in others:
        axes.set_yticks(range(len(order)), order if axes is others[0] else [""] * len(order))
    left.legend(ncols=2)


LAB = Lab(
    name="optimizers",
    title_en="Optimizers and Newton's method",
    title_zh="优化器与牛顿法",
    claim_en="Newton's method needs far fewer steps than SGD or Adam, so it should replace them.",
    claim_zh="牛顿法收敛所需的步数远少于 SGD 和 Adam，所以应当取代一阶方法。",
    regime="Losses without noise, fp32, one CPU thread. A quadratic in 64 dimensions with log-spaced eigenvalues along "
    f"random directions (target: 1e-4 of the first loss); Rosenbrock's function (1e-3); a network of 380 parameters on "
    f"{WINDOWS} windows of text (1.7 nats). No weight decay.",
    varies="The optimizer: every kind of bagu.train.optim at the constant learning rate that is best with another seed "
    "(decades from 1e-4 to 100, then in a full run the half-decades beside the best); Newton's method, plain and damped "
    "with |H| + μI. The condition number of the quadratic.",
    measures="Steps until the loss is first at its target, median of three seeds (quick: one); median time of a step; "
    "bytes of state for a model of 5.9M parameters.",
    needs_gpu=False,
    run=run,
    verdict=verdict,
    plot=plot,
)
