"""The models against their definitions, signs on probes, coverage by simulation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bagu.process.fit import fit_target
from bagu.process.models import trees
from bagu.process.models.gp import GP
from bagu.process.models.mlp import Mlp
from bagu.process.models.ridge import Ridge
from bagu.process.plants import PLANTS
from bagu.process.plants.history import history
from bagu.process.run import fit_process
from bagu.process.schema import Field, Schema
from bagu.process.splits import make_splits
from bagu.process.table import Column, Table
from bagu.process.target_model import conformal_quantile, error_weights, greedy_weights


def waves(n: int, seed: int, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3))
    return x, np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] ** 2 + noise * rng.standard_normal(n)


def test_the_gp_is_its_formula() -> None:
    """Mean and variance by a plain double loop and a solve, at the hyperparameters that were found."""
    x, y = waves(40, 0)
    gp, probes = GP.fit(x, y), waves(7, 1)[0]
    lengths, signal, noise = np.exp(gp.theta[:-2]), np.exp(gp.theta[-2]), np.exp(gp.theta[-1])

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        r = np.sqrt(5 * (((a - b) / lengths) ** 2).sum())
        return signal * (1 + r + r * r / 3) * np.exp(-r)

    k = np.array([[kernel(a, b) for b in x] for a in x]) + (noise + 1e-8) * np.eye(len(x))
    ks = np.array([[kernel(a, b) for b in x] for a in probes])
    mean = gp.centre + gp.scale * ks @ np.linalg.solve(k, (y - y.mean()) / y.std())
    variance = signal - np.einsum("ij,ji->i", ks, np.linalg.solve(k, ks.T))
    found, sd = gp.mean_sd(probes)
    np.testing.assert_allclose(found, mean, rtol=1e-8)
    np.testing.assert_allclose((sd / gp.scale) ** 2, variance, rtol=1e-6)


def test_the_gradient_of_the_gp_is_that_of_its_value() -> None:
    from bagu.process.models.gp import _objective

    x, y = waves(25, 2)
    theta, prior = np.array([0.3, -0.2, 0.7, 0.1, -1.0]), np.array([[0.0, 1.0]] * 5)
    _, gradient = _objective(theta, x, y, prior)
    for i in range(5):
        step = np.zeros(5)
        step[i] = 1e-6
        slope = (_objective(theta + step, x, y, prior)[0] - _objective(theta - step, x, y, prior)[0]) / 2e-6
        assert slope == pytest.approx(gradient[i], rel=1e-4, abs=1e-5)


def test_ridge_finds_a_quadratic_and_the_gp_beats_it_on_waves() -> None:
    x, _ = waves(200, 3)
    square = 1 + 2 * x[:, 0] - x[:, 1] * x[:, 2] + 0.5 * x[:, 2] ** 2
    np.testing.assert_allclose(Ridge.fit(x, square).predict(x), square, atol=1e-3)
    y, (probes, truth) = waves(200, 3)[1], waves(200, 4, noise=0)
    errors = [np.sqrt(((m.fit(x, y).predict(probes) - truth) ** 2).mean()) for m in (Ridge, GP)]
    assert errors[1] < 0.6 * errors[0]


def test_the_mlp_learns_and_gives_the_same_bits() -> None:
    (x, y), (probes, truth) = waves(120, 5), waves(100, 6, noise=0)
    a, b = Mlp.fit(x, y), Mlp.fit(x, y)
    np.testing.assert_array_equal(a.predict(probes), b.predict(probes))
    assert ((a.predict(probes) - truth) ** 2).mean() < 0.35 * truth.var()
    np.testing.assert_array_equal(Mlp.from_arrays(a.arrays()).predict(probes), a.predict(probes))


def test_a_head_of_the_mlp_is_a_network_of_its_own() -> None:
    """The layers of one head without the product that all heads share."""
    from bagu.process.models.mlp import WIDTH, _forward, _initial

    w = _initial(3, torch.Generator().manual_seed(1))
    w["out_bias"] = torch.arange(16.0)
    x = torch.tensor(waves(9, 8)[0], dtype=torch.float32)
    for head, found in enumerate(_forward(w, x).T):
        hidden = (x * w["signs"][head]) @ w["first"].T + w["first_bias"][head]
        hidden = F.gelu(F.layer_norm(hidden, (WIDTH,), w["norm"], w["norm_bias"]))
        hidden = hidden + F.gelu((hidden * w["scales"][head]) @ w["second"].T + w["second_bias"][head])
        torch.testing.assert_close(found, hidden @ w["out"][head] + w["out_bias"][head], rtol=1e-5, atol=1e-5)


def test_a_step_of_the_mlp_is_that_of_torch_adamw() -> None:
    from bagu.process.models.mlp import DECAY, _adamw

    flat, peer = torch.ones(5), torch.ones(5, requires_grad=True)
    state, optimizer = (torch.zeros(5), torch.zeros(5)), torch.optim.AdamW([peer], lr=0.0, weight_decay=DECAY)
    for step, rate in enumerate((0.1, 0.2, 0.05), start=1):
        slope = torch.randn(5, generator=torch.Generator().manual_seed(step))
        peer.grad, optimizer.param_groups[0]["lr"] = slope.clone(), rate
        optimizer.step()
        _adamw(flat, slope, *state, step, rate)
        torch.testing.assert_close(flat, peer.detach())


@pytest.mark.skipif(not trees.offered(), reason="LightGBM is not installed")
def test_trees_of_the_child_process_keep_signs_and_are_killed_in_time() -> None:
    x, y = waves(300, 7)
    (model,) = trees.fit_trees(x, y + x[:, 2], np.array([0, 0, 1]), [np.arange(300)], seconds=120) or []
    assert ((model.predict(x) - y - x[:, 2]) ** 2).mean() < 0.2 * y.var()
    probe = np.repeat(x[:50], 40, 0)
    probe[:, 2] = np.tile(np.linspace(-3, 3, 40), 50)
    assert np.diff(model.predict(probe).reshape(50, 40), axis=1).min() >= 0
    assert trees.fit_trees(x, y, np.zeros(3, int), [np.arange(300)], seconds=0.01) is None


@pytest.mark.parametrize("lines", [60, pytest.param(250, marks=pytest.mark.slow)])
def test_signs_hold_for_the_mean_and_both_ends_of_the_band(lines: int) -> None:
    """40 probes along each line; 250 lines are 10,000 probes of each signed input."""
    past = history(PLANTS["reactor"], 80, 1)
    schema = past.schema
    for name, sign in (("temperature", 1), ("feed", -1)):  # neither is true of this plant: the harder case
        schema = schema.with_field(replace(schema[name], sign=sign))
    made = fit_process(past.table, schema, models=())
    rng = np.random.default_rng(0)
    for column, sign in ((0, 1), (2, -1)):
        probe = np.repeat(made.x[rng.integers(80, size=lines)], 40, 0)
        probe[:, column] = np.tile(np.linspace(-3, 3, 40), lines)
        found = made.goal.model.predict(probe)
        for part in (found.mean, found.low, found.high):
            assert (sign * np.diff(part.reshape(lines, 40), axis=1)).min() >= 0
        assert (found.low <= found.mean).all() and (found.mean <= found.high).all()


@pytest.mark.parametrize("name", ["coating", "turbojet"])
def test_intervals_cover_what_they_say(name: str) -> None:
    """Ten histories, 100 later rows each: 900 of 1,000 expected; 3 % is three standard errors."""
    hits = []
    for seed in range(10):
        whole = history(PLANTS[name], 220, seed)
        made = fit_process(whole.first(120).table, whole.schema, models=())
        later = whole.table.take(np.arange(120, 220))
        found, y = made.goal.model.predict(made.encoder.of_table(later)), later[PLANTS[name].target].values
        hits.append(((y >= found.low) & (y <= found.high)).mean())
    assert 0.86 < np.mean(hits) < 0.95


def test_a_noisy_line_does_not_hide_behind_quiet_ones() -> None:
    """Lines with noise of 0.1 and 0.4: one width for both would cover about 99 % and 80 %."""
    hits: dict[str, list[float]] = {"a": [], "b": []}
    for seed in range(6):
        rng = np.random.default_rng(seed)
        (x, y), line = waves(400, seed, noise=0), rng.choice(["a", "b"], 400)
        y = y + np.where(line == "a", 0.1, 0.4) * rng.standard_normal(400)
        numbers = [Column(name=n, kind="number", values=v) for n, v in zip("uvwy", (*x.T, y), strict=True)]
        table = Table(columns=(*numbers, Column(name="line", kind="category", values=line)))
        roles = [Field(name=n, role="setting") for n in "uvw"] + [Field(name="y", role="target", goal="max")]
        schema = Schema(columns=(*roles, Field(name="line", role="context", kind="category", levels=("a", "b"))))
        made = fit_process(table.take(np.arange(200)), schema, models=())
        assert set(made.goal.by_group) == {"line a", "line b"}
        found = made.goal.model.predict(made.encoder.of_table(table))
        for name, some in hits.items():
            later = (line == name) & (np.arange(400) >= 200)
            some.append(float(((y >= found.low) & (y <= found.high))[later].mean()))
    assert all(0.85 < np.mean(some) < 0.95 for some in hits.values())


def test_splits_keep_batches_whole_and_look_forward() -> None:
    past = history(PLANTS["coating"], 120, 2, batches=True)
    splits = make_splits(past.table, past.schema)
    batch, stamp = past.table["batch"].values, past.table["stamp"].values
    assert (splits.honest.name, splits.calibrate.name) == ("forward", "group")
    for train, test in (*splits.honest.folds, *splits.calibrate.folds):
        assert not set(batch[train]) & set(batch[test])
    for train, test in splits.honest.folds:
        assert stamp[train].max() < stamp[test].min()


@pytest.mark.parametrize(("rows", "found"), [(199, (14, 14, 5)), (200, (5, 5, 5))])
def test_few_rows_have_more_folds_where_they_weigh_the_models(rows: int, found: tuple[int, ...]) -> None:
    past = history(PLANTS["coating"], rows, 2)
    label = Column(name="batch", kind="category", values=np.array([f"B{i % 14}" for i in range(rows)]))
    table = replace(past.table, columns=(*past.table.columns, label))
    grouped = replace(past.schema, columns=(*past.schema.columns, Field(name="batch", role="group", kind="category")))
    splits = make_splits(table, grouped)
    assert tuple(len(s.folds) for s in (splits.honest, splits.calibrate, splits.plain)) == found
    plain = make_splits(past.table, past.schema)
    assert plain.honest is plain.plain
    assert len(plain.plain.folds) == (20 if rows < 200 else 5)
    assert np.array_equal(np.sort(plain.plain.tested), np.arange(rows))


def test_a_batch_effect_makes_the_random_score_too_good() -> None:
    """Five rows of a batch share their context and a hidden effect: only the split by batch shows it."""
    past = history(PLANTS["reactor"], 150, 4, batches=True)
    effect = np.repeat(np.random.default_rng(0).standard_normal(30), 5) * 15
    table = replace(past.table, columns=tuple(
        replace(c, values=c.values + effect) if c.name == "yield" else c for c in past.table.columns
    ))  # fmt: skip
    fit = fit_process(table, past.schema, models=()).goal
    scores = {s.split: s.r2 for s in fit.scores["ensemble"]}
    assert scores["random"] > scores["group"] + 0.05


def test_small_parts() -> None:
    assert conformal_quantile(np.arange(1.0, 10.0)) == 9
    assert conformal_quantile(np.arange(1.0, 20.0)) == 18
    y = np.array([1.0, 2.0, 3.0, 4.0])
    assert greedy_weights({"wrong": -y, "right": y + 0.01}, y) == {"wrong": 0.0, "right": 1.0}
    assert error_weights({"wrong": -y, "right": y}, y) == {"wrong": 0.0, "right": 1.0}
    halves = error_weights({"one": y + 1, "other": y + 2 ** (1 / 8)}, y)
    assert np.allclose([halves["one"], halves["other"]], [2 / 3, 1 / 3])
    assert fit_target.__doc__
