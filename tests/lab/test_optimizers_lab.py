"""The optimizers lab: its problems, Newton's method, and verdicts."""

from __future__ import annotations

import pytest
import torch

from bagu.lab.core import Row
from bagu.lab.train import optimizers
from bagu.lab.train.optimizers import descent, problems

HESSIAN, ADAM = 138e12, 47e6


def row(problem: str, optimizer: str, steps: int | None, step_us: float, **more: float | None) -> Row:
    newton = optimizer in optimizers.NEWTON
    made: Row = {"problem": problem, "condition": None, "optimizer": optimizer, "parameters": 380, "steps": steps}
    made |= {"step_us": step_us, "time_ms": None if steps is None else steps * step_us / 1e3}
    made |= {"large_model_parameters": 5_868_800, "large_model_state_bytes": HESSIAN if newton else ADAM}
    return made | {"memory_available_bytes": 64e9} | more


def problem(name: str, *, newton: tuple[int | None, float], adam: tuple[int | None, float], **more: float) -> list[Row]:
    return [row(name, "adam", *adam, **more), row(name, "newton", *newton, **more)]


def test_the_verdict_flips() -> None:
    valley = problem("Rosenbrock", newton=(5, 1000.0), adam=(500, 100.0))
    slow = problem("network", newton=(5, 1e6), adam=(50, 100.0))
    more = problem("network", newton=(60, 1.0), adam=(50, 100.0))  # fast steps, but too many
    fast = problem("network", newton=(5, 100.0), adam=(50, 100.0))
    assert optimizers.verdict([*valley, *slow]).kind == "holds only where"
    assert optimizers.verdict(slow).kind == "did not hold"
    assert optimizers.verdict(more).kind == "did not hold"
    assert optimizers.verdict([*valley, *fast]).kind == "holds only where"  # the Hessian does not fit
    roomy = [r | {"memory_available_bytes": 1e15} for r in [*valley, *fast]]
    assert optimizers.verdict(roomy).kind == "held"


def test_the_verdict_names_where_and_what_failed() -> None:
    rows = [
        *problem("quadratic", newton=(1, 1000.0), adam=(80, 100.0), condition=100),
        *problem("network", newton=(None, 1e6), adam=(50, 100.0)),
        row("network", "damped newton", 8, 1e6),
    ]
    sentence = optimizers.verdict(rows).sentence_en
    assert "fewest steps on quadratic κ = 100, network; also the least time on quadratic κ = 100." in sentence
    assert "damped newton: 8 × 1e+03 ms" in sentence
    assert "undamped it does not reach the target" in sentence
    assert "138 TB" in sentence
    solved = optimizers.verdict([*rows[:3], row("network", "newton", 9, 1e6)]).sentence_en
    assert "undamped" not in solved


def test_a_problem_that_only_one_solves_counts_for_it() -> None:
    (alone,) = optimizers.standings(problem("network", newton=(60, 1e6), adam=(None, 100.0)))
    assert alone.replaces
    (never,) = optimizers.standings(problem("network", newton=(None, 1e6), adam=(None, 100.0)))
    assert not never.fewer_steps


@pytest.mark.parametrize("condition", [1, 10_000])
def test_newton_solves_a_quadratic_in_one_step(condition: int) -> None:
    quadratic = problems.Quadratic(condition, seed=1)
    eigenvalues = torch.linalg.eigvalsh(quadratic.A.double())
    assert eigenvalues.max() / eigenvalues.min() == pytest.approx(condition, rel=1e-2)
    g, H = descent.gradient_and_hessian(quadratic(), list(quadratic.parameters()))
    torch.testing.assert_close(H.float(), quadratic.A)
    torch.testing.assert_close(g.float(), (quadratic.A @ quadratic.theta).detach())
    assert descent.newton(quadratic, damped=False, budget=3).steps == 1


def test_gradient_descent_takes_one_step_where_the_curvature_is_one() -> None:
    assert descent.first_order(problems.Quadratic(1, seed=1), "sgd", lr=1.0, budget=3).steps == 1
    assert descent.first_order(problems.Quadratic(1, seed=1), "sgd", lr=0.1, budget=3).steps is None
    assert descent.first_order(problems.Quadratic(1, seed=1), "sgd", lr=1e9, budget=300).steps is None  # diverges
    assert descent.best_lr(lambda: problems.Quadratic(1, seed=0), "sgd", budget=50, halves=True) == 1.0
    assert descent.best_lr(lambda: problems.Quadratic(10_000, seed=0), "sgd", budget=5, halves=True) is None


def test_damped_newton_leaves_a_maximum_and_plain_newton_does_not() -> None:
    class Cosine(problems.Problem):
        def __init__(self) -> None:
            super().__init__()
            self.theta = torch.nn.Parameter(torch.tensor([0.3]))  # near the maximum at 0; the minimum is at π
            self.target = -0.999

        def forward(self) -> torch.Tensor:
            return self.theta.cos().sum()

    assert descent.newton(Cosine(), damped=True, budget=20).steps is not None
    assert descent.newton(Cosine(), damped=False, budget=20).steps is None


def test_the_network_has_matrices_and_the_state_is_counted() -> None:
    network = problems.NextLetter(problems.corpus_letters(), seed=1)
    assert sum(p.numel() for p in network.parameters()) == 380
    assert len(network.windows) == problems.WINDOWS
    sizes = {name: optimizers.large_state_bytes(name) for name in ("sgd", "lion", "muon", "adam", "newton")}
    parameters = sizes["lion"] // 4
    assert (sizes["sgd"], sizes["adam"], sizes["newton"]) == (0, 8 * parameters, 4 * parameters**2)
    assert sizes["lion"] < sizes["muon"] < sizes["adam"]  # AdamW's second state for the embedding and the vectors only
