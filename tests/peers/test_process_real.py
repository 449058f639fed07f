"""Models of process data on seven files of real experiments, from the wheel `olymp` (nothing of it is imported).

The ensemble is judged by rows that chose neither its members nor its weights: five outer folds, a whole fit in each.
"""

import io
import math
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest

from bagu.process.files import read_table
from bagu.process.run import fit_process
from bagu.process.schema import Field, Schema

FILES = ("hplc", "photo_pce10", "suzuki", "alkox", "fullerenes", "benzylation", "snar")
MOST, FOLDS = 700, 5
SINGLE = ("ridge", "gp", "trees")


def experiment(name: str, folder: Path) -> tuple[np.ndarray, list[str]]:
    """The rows of a file, without a header in it; the last column is what was measured."""
    path = distribution("olymp").locate_file(f"olympus/datasets/dataset_{name}/data.csv")
    rows = np.genfromtxt(io.StringIO(Path(str(path)).read_text(encoding="utf-8")), delimiter=",")
    rows = rows[np.isfinite(rows).all(1)]
    if len(rows) > MOST:
        rows = rows[np.sort(np.random.default_rng(0).permutation(len(rows))[:MOST])]
    names = [f"x{i}" for i in range(rows.shape[1] - 1)] + ["y"]
    np.savetxt(folder / f"{name}.csv", rows, delimiter=",", header=",".join(names), comments="")
    return rows, names


def judged(name: str, folder: Path) -> tuple[dict[str, float], float]:
    """The RMSE of the ensemble and of single models on rows they have not seen, and the coverage of the interval."""
    rows, names = experiment(name, folder)
    table = read_table(folder / f"{name}.csv")
    fields = [Field(name=n, role="setting") for n in names[:-1]] + [Field(name="y", role="target", goal="max")]
    fold = np.random.default_rng(1).permutation(len(rows)) % FOLDS
    errors: dict[str, list[float]] = {n: [] for n in ("ensemble", *SINGLE)}
    inside: list[float] = []
    for k in range(FOLDS):
        kept, rest = table.take(np.flatnonzero(fold != k)), table.take(np.flatnonzero(fold == k))
        made = fit_process(replace(kept, notes=()), Schema(columns=tuple(fields)), models=("trees",), minutes=10)
        x, y, model = made.encoder.of_table(rest), rest["y"].values, made.goal.model
        found = model.predict(x)
        errors["ensemble"] += list((found.mean - y) ** 2)
        inside += list((y >= found.low) & (y <= found.high))
        for n in SINGLE:
            errors[n] += list((model.members[n].predict(x) - y) ** 2)
    return {n: math.sqrt(float(np.mean(e))) for n, e in errors.items()}, float(np.mean(inside))


def test_the_ensemble_is_as_good_as_the_best_single_model(tmp_path: Path) -> None:
    pytest.importorskip("lightgbm")
    ratios, covered = {}, {}
    for name in FILES:
        rmse, covered[name] = judged(name, tmp_path)
        ratios[name] = rmse["ensemble"] / min(rmse[n] for n in SINGLE)
        print(f"{name}: {rmse}, ratio {ratios[name]:.3f}, coverage {covered[name]:.3f}", flush=True)
    assert np.mean(list(ratios.values())) <= 1.02, ratios
    assert 0.87 <= np.mean(list(covered.values())) <= 0.93, covered
