"""Optimizers: those of `bagu.train.optim` and Newton's method, compared in steps, time and memory.

The problems are a quadratic with condition number κ, Rosenbrock's function, and a small network that predicts the next
letter of text from the standard library. All are without noise and have few parameters, which is the best case for
Newton's method. Weight decay is 0, so that all minimize the same function; AdamW is then Adam with other betas.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import cast, get_args

from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, where
from bagu.lab.plot import COLOURS, INK, Line, Note, Panel
from bagu.lab.train.optimizers.descent import Descent, best_lr, first_order, newton, one_thread
from bagu.lab.train.optimizers.problems import WINDOWS, NextLetter, Problem, Quadratic, Rosenbrock, corpus_letters
from bagu.machine.device import available_memory
from bagu.nn import Transformer, count, preset
from bagu.train.memory.flat import FlatParameters, Role, roles
from bagu.train.optim import Optimizer, OptimizerConfig
from bagu.train.optim.config import Kind as Rule

NEWTON = ("newton", "damped newton")
NEWTON_BUDGET = 60
SEARCH_SEED, SEEDS = 0, (1, 2, 3)
LARGE = preset("cpu_6m")  # trains on a laptop in minutes
UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "B": 1.0}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem, for any seed, and its maximum number of first-order updates."""

    name: str
    make: Callable[[int], Problem]
    budget: int
    condition: int | None = None


def cases(setting: Setting) -> list[Case]:
    quick = setting.quick
    conditions = (1, 1_000) if quick else (1, 10, 100, 1_000, 10_000)
    return [
        *(
            Case(name="quadratic", make=partial(Quadratic, c), budget=8 if quick else 2000, condition=c)
            for c in conditions
        ),
        Case(name="Rosenbrock", make=Rosenbrock, budget=8 if quick else 2000),
        Case(name="network", make=partial(NextLetter, corpus_letters()), budget=3 if quick else 300),
    ]


def run(setting: Setting) -> list[Row]:
    points: list[tuple[Case, str]] = []
    for case in cases(setting):
        has_matrix = Role.MATRIX in roles(case.make(SEARCH_SEED)).values()  # without a matrix Muon is AdamW
        points += [(case, name) for name in (*get_args(Rule), *NEWTON) if name != "muon" or has_matrix]
    with one_thread():
        return [point(case, name, setting) for case, name in setting.track(points)]


def point(case: Case, name: str, setting: Setting) -> Row:
    """One optimizer on one problem. The learning rate is chosen with one seed, and measured with others."""
    seeds = SEEDS[:1] if setting.quick else SEEDS
    lr, runs = descents(case, name, seeds, halves=not setting.quick)
    reached = [done.steps for done in runs if done.steps is not None]
    steps = statistics.median_low(reached) if len(reached) == len(seeds) else None
    step_s = min(done.step_s for done in runs)  # the best median: other load on the machine can only slow a step
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
        "large_model_parameters": large_parameters(),
        "large_model_state_bytes": large_state_bytes(name),
        "memory_available_bytes": available_memory(),
    }


def descents(case: Case, name: str, seeds: Sequence[int], *, halves: bool) -> tuple[float | None, list[Descent]]:
    """The learning rate (None if there is none to choose, or none reaches the target), and a run for each seed."""
    if name in NEWTON:
        damped = name == "damped newton"
        newton(case.make(SEARCH_SEED), damped=damped, budget=1)  # warmup: the first call is slow
        return None, [newton(case.make(seed), damped=damped, budget=NEWTON_BUDGET) for seed in seeds]
    rule = cast("Rule", name)
    lr = best_lr(partial(case.make, SEARCH_SEED), rule, budget=case.budget, halves=halves)
    if lr is None:  # the time of a step is still measured
        return None, [first_order(case.make(SEARCH_SEED), rule, lr=0.0, budget=20)]
    return lr, [first_order(case.make(seed), rule, lr=lr, budget=case.budget) for seed in seeds]


@cache
def large_parameters() -> int:
    return count.parameters(LARGE).total


@cache
def large_state_bytes(name: str) -> int:
    """Bytes of optimizer state for the large model, besides parameters and gradients, in fp32."""
    if name in NEWTON:
        return 4 * large_parameters() ** 2
    flat = FlatParameters(Transformer(LARGE, device="meta"))
    state = Optimizer(OptimizerConfig(kind=cast("Rule", name)), flat).tensors().values()
    return sum(t.numel() * t.element_size() for t in state)


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The best on one problem: Newton's method, plain or damped; first-order rules by steps and by time."""

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
    """Whether a has less; a problem that only one of them solves counts for that one."""
    return a is not None and (b is None or number(a, key) < number(b, key))


def standings(rows: Sequence[Row]) -> list[Standing]:
    found = []
    for label in dict.fromkeys(map(labelled, rows)):
        solved = [row for row in rows if labelled(row) == label and row["steps"] is not None]
        second = [row for row in solved if row["optimizer"] in NEWTON]
        first = [row for row in solved if row["optimizer"] not in NEWTON]
        found.append(
            Standing(
                label=label,
                newton=min(second, key=lambda row: number(row, "steps"), default=None),
                fewest=min(first, key=lambda row: number(row, "steps"), default=None),
                fastest=min(first, key=lambda row: number(row, "time_ms"), default=None),
            )
        )
    return found


def labelled(row: Row) -> str:
    return str(row["problem"]) + ("" if row["condition"] is None else f" κ = {number(row, 'condition'):,.0f}")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if Newton's method has fewer steps and less time on every problem, and fits in memory for the large
    model."""
    every = standings(rows)
    fewer, replaces = [s for s in every if s.fewer_steps], [s for s in every if s.replaces]
    state = {str(row["optimizer"]): number(row, "large_model_state_bytes") for row in rows}
    plain = next(row for row in rows if row["problem"] == "network" and row["optimizer"] == "newton")
    network = next(s for s in every if s.label == "network")
    fits = plain["memory_available_bytes"] is None or state["newton"] <= number(plain, "memory_available_bytes")
    kind: Kind = "held" if fits and len(replaces) == len(every) else "holds only where" if replaces else "did not hold"
    size, small = number(plain, "large_model_parameters") / 1e6, plain["parameters"]
    adam, hessian = bytes_text(state["adam"]), bytes_text(state["newton"])
    rivals = list(dict.fromkeys((described(network.fewest), described(network.fastest))))  # often the same
    fails = plain["steps"] is None
    return Verdict(
        kind=kind,
        sentence_en=f"Newton's method takes the fewest steps on {listed(fewer, ', ', 'no problem')}; also the least "
        f"time on {listed(replaces, ', ', 'none')}. On the network of {small} parameters: {described(network.newton)}; "
        f"first-order methods: {' and '.join(rivals)}"
        f"{'; undamped it does not reach the target' if fails else ''}. For {size:.1f}M parameters Adam's state is "
        f"{adam} and the Hessian {hessian}, which {'fits' if fits else 'does not fit'} in the memory of this machine.",
        sentence_zh=f"牛顿法步数最少的问题：{listed(fewer, '、', '无')}；耗时也最短的：{listed(replaces, '、', '无')}。"
        f"在 {small} 个参数的网络上：{described(network.newton)}；一阶方法：{'、'.join(rivals)}"
        f"{'；不加阻尼的牛顿法无法达到目标' if fails else ''}。对 {size:.1f}M 参数的模型，Adam 的状态为 {adam}，"
        f"海森矩阵为 {hessian}，本机内存{'放得下' if fits else '放不下'}。",
    )


def listed(found: Sequence[Standing], comma: str, none: str) -> str:
    return comma.join(s.label for s in found) or none


def described(row: Row | None) -> str:
    if row is None:
        return "none"
    return f"{row['optimizer']}: {number(row, 'steps'):.0f} × {number(row, 'step_us') / 1e3:.3g} ms"


def bytes_text(size: float) -> str:
    unit = next((unit for unit, scale in UNITS.items() if size >= scale), "B")
    return f"{size / UNITS[unit]:.3g} {unit}"


def plot(rows: Sequence[Row]) -> list[Panel]:
    """Steps over the condition number; then steps, time and memory, with a line per optimizer."""
    order = [name for name in (*get_args(Rule), *NEWTON) if where(rows, optimizer=name)]
    steps = []
    for i, name in enumerate(order):
        dashed = name == "damped newton" or len(COLOURS) <= i < len(order) - len(NEWTON)
        own = [r for r in where(rows, optimizer=name, problem="quadratic") if r["steps"] is not None]
        colour = INK if name in NEWTON else i
        if own:
            steps.append(Line.of(own, "condition", "steps", name, "o--" if dashed else "o-", colour))
    x = "condition number κ"
    panels = [Panel(steps, "Steps on a quadratic", x, "steps", "log", "log", legend="below", width=1.6)]
    for key, unit, title in (("steps", "steps", "Steps to the target"), ("time_ms", "ms", "Time to the target")):
        marks = []
        for problem, marker in (("network", "o"), ("Rosenbrock", "D")):
            own = [r for r in where(rows, problem=problem) if r[key] is not None]
            marks.append(Line.of(own, key, lambda r: order.index(str(r["optimizer"])), problem, marker))
        names = order if key == "steps" else [""] * len(order)
        panels.append(Panel(marks, title, unit, xscale="log", ynames=names, legend="below"))
    state = {str(r["optimizer"]): number(r, "large_model_state_bytes") for r in rows}
    sizes = [(size, order.index(name)) for name, size in state.items() if size]
    zeros = [Note(None, order.index(name), "0", shift=(0, -3)) for name, size in state.items() if not size]
    line = Line([size for size, _ in sizes], [at for _, at in sizes], "", "s", INK)
    empty = [""] * len(order)
    return [*panels, Panel([line, *zeros], "State", "bytes, 5.9M parameters", xscale="log", ynames=empty)]


LAB = Claim(
    title_en="Optimizers and Newton's method",
    title_zh="优化器与牛顿法",
    claim_en="Newton's method needs far fewer steps than SGD or Adam, so it should replace them.",
    claim_zh="牛顿法收敛所需的步数远少于 SGD 和 Adam，所以应当取代一阶方法。",
    regime="Losses without noise, fp32, one CPU thread. A quadratic in 64 dimensions with log-spaced eigenvalues along "
    "random directions (target: 1e-4 of the first loss); Rosenbrock's function (1e-3); a network of 380 parameters on "
    f"{WINDOWS} windows of text (1.7 nats). No weight decay.",
    varies="Condition number; optimizer: every kind of bagu.train.optim, Newton's method, plain and damped. The "
    "learning rate is constant; it is the best one for another seed (powers of ten from 1e-4 to 100; in a full run "
    "also the half-decades next to the best).",
    measures="Steps until the loss first reaches its target, median of three seeds (quick: one); median time of a "
    "step; bytes of state for a model of 5.9M parameters. Of Newton's method the better form counts.",
    evidence="training",
)
