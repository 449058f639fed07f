"""A fitted process in a folder: the rows, the roles, the models, and what was judged of them.

    data.csv     the rows, as given (or .parquet)   schema.toml   the roles
    process.json what was asked, and what is done   models/       a safetensors file per target and model
    report.html  the report (and report.zh.html)    answers.jsonl the recommendations that were given

No pickle. `fit` on a folder whose fit was killed goes on with the models that are finished, with the same bits.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bagu.config.files import write_atomic
from bagu.errors import BaguError
from bagu.process.domain import Domain
from bagu.process.encode import Encoder
from bagu.process.files import data_file, parse_table, read_table
from bagu.process.fit import KINDS, Fitted, TargetFit, fit_target, prepare
from bagu.process.health import moved_together
from bagu.process.limits import Limit, parse_limits
from bagu.process.models.gp import GP, spread_rows
from bagu.process.schema import Schema, read_schema, write_schema
from bagu.process.table import Table
from bagu.runs.lock import Lock

MODELS = ("trees", "mlp")  # besides mean, ridge and gp, which every fit has
HALVES = 10  # pairs of halves, of which one chooses and the other promises
HALF_ROWS = 400
CONTEXT_INSIDE = 0.99


@dataclass(frozen=True)
class Process:
    """Everything that a recommendation needs. `rows` are those with the goal's target, `x` their matrix."""

    schema: Schema
    table: Table
    encoder: Encoder
    fits: dict[str, TargetFit]
    path: Path | None = None

    @property
    def goal(self) -> TargetFit:
        return self.fits[self.schema.target.name]

    @property
    def better(self) -> float:
        """+1 if more of the goal is better, else -1."""
        return 1.0 if self.schema.target.goal == "max" else -1.0

    @cached_property
    def rows(self) -> Table:
        return prepare(self.table, self.schema, self.schema.target.name)[0]

    @cached_property
    def x(self) -> np.ndarray:
        return self.encoder.of_table(self.rows)

    @cached_property
    def y(self) -> np.ndarray:
        return self.rows[self.schema.target.name].values

    @cached_property
    def limits(self) -> list[Limit]:
        return parse_limits(self.schema.limits, self.schema)

    @cached_property
    def domain(self) -> Domain:
        return Domain.of(self.x)

    @cached_property
    def context_columns(self) -> np.ndarray:
        roles = [f.role for f in self.encoder.fields]
        return np.flatnonzero([roles[i] == "context" for i in self.encoder.owner])

    @cached_property
    def context_domain(self) -> Domain:
        return Domain.of(self.x[:, self.context_columns], CONTEXT_INSIDE)

    @cached_property
    def halves(self) -> list[tuple[GP, GP]]:
        """Gaussian processes on random halves of the rows, with the hyperparameters of all."""
        rng, gp, made = np.random.default_rng(0), self.goal.model.gp, []
        for _ in range(HALVES):
            order = rng.permutation(spread_rows(len(self.y), 2 * HALF_ROWS))
            a, b = order[: len(order) // 2], order[len(order) // 2 :]
            made.append((gp.on(self.x[a], self.y[a]), gp.on(self.x[b], self.y[b])))
        return made

    @cached_property
    def tied(self) -> list[tuple[str, str, float]]:
        return moved_together(self.rows, self.schema)


def fit_process(
    table: Table, schema: Schema, *, models: Sequence[str] = MODELS, minutes: float = 2.0, store: Store | None = None
) -> Process:
    """Fit every target that is the goal or that a limit names."""
    if table.rows > 10 and not schema.of("setting"):
        raise BaguError(
            "no column is a setting",
            hint="give those that you choose the role setting: in the TOML file of `bagu process look`, or on the page",
        )
    wanted = [schema.target.name]
    parsed = parse_limits(schema.limits, schema)
    wanted += [
        n for n in dict.fromkeys(limit.name for limit in parsed) if schema[n].role == "target" and n not in wanted
    ]
    rows, _ = prepare(table, schema, wanted[0])
    encoder = Encoder.of(rows, schema.inputs)
    deadline = time.monotonic() + 60 * minutes
    fits = {}
    for i, name in enumerate(wanted):
        part = deadline - (deadline - time.monotonic()) * (len(wanted) - i - 1) / (len(wanted) - i)
        hooks: dict[str, Any] = {} if store is None else {"load": store.loader(i), "save": store.saver(i)}
        fits[name] = fit_target(table, schema, encoder, name, models=tuple(models), deadline=part, **hooks)
    return Process(schema, table, encoder, fits, None if store is None else store.path)


@dataclass(frozen=True)
class Store:
    """The files of a run."""

    path: Path
    lock: Lock = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lock", Lock(self.path / "run.lock"))

    def loader(self, target: int) -> Any:
        return lambda name: read_fitted(self._file(target, name), name)

    def saver(self, target: int) -> Any:
        return lambda name, fitted: write_fitted(self._file(target, name), fitted)

    def _file(self, target: int, name: str) -> Path:
        return self.path / "models" / f"{target}_{name}.safetensors"


def is_process_run(path: Path) -> bool:
    return (path / "process.json").is_file()


def create(data: bytes, schema: Schema, out: Path, *, models: Sequence[str] = MODELS, minutes: float = 2.0) -> Process:
    """Fit and keep the run in `out`; an unfinished run of the same data and roles goes on."""
    asked = {
        "data": hashlib.sha256(data).hexdigest(),
        "models": list(models),
        "minutes": minutes,
        "schema": hashlib.sha256(repr(schema).encode()).hexdigest(),
    }
    if is_process_run(out):
        before = json.loads((out / "process.json").read_text(encoding="utf-8"))
        if before["asked"] != asked and before["done"]:
            raise BaguError(f"{out} holds a run of other data or roles", hint="give another folder with --out")
        if before["asked"] != asked:  # never finished: its models are of other rows
            for file in (out / "models").glob("*"):
                file.unlink()
    elif out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BaguError(f"{out} is not an empty folder", hint="give a new folder with --out")
    table = parse_table(data, "the data")
    store = Store(out)
    out.mkdir(parents=True, exist_ok=True)
    store.lock.take()
    try:
        (out / "models").mkdir(exist_ok=True)
        (out / data_file(data)).write_bytes(data)
        write_schema(schema, out / "schema.toml")
        write_atomic(out / "process.json", json.dumps({"asked": asked, "done": False}, indent=1) + "\n")
        made = fit_process(table, schema, models=models, minutes=minutes, store=store)
        write_atomic(out / "process.json", json.dumps({"asked": asked, "done": True, **summary(made)}, indent=1) + "\n")
    finally:
        store.lock.release()
    return made


def open_run(path: Path) -> Process:
    """A finished run. Its models are read, and everything that follows from them is computed again."""
    if not is_process_run(path):
        raise BaguError(f"{path} is not a run of bagu process", hint="make one with `bagu process fit DATA --out DIR`")
    state = json.loads((path / "process.json").read_text(encoding="utf-8"))
    if not state["done"]:
        raise BaguError(f"the fit of {path} was not finished", hint="run the same `bagu process fit` again")
    table = read_table(data_path(path))
    return fit_process(
        table, read_schema(path / "schema.toml"), models=state["members"], minutes=0.0, store=Store(path)
    )


def data_path(run: Path) -> Path:
    return run / "data.csv" if (run / "data.csv").exists() else run / "data.parquet"


def summary(made: Process) -> dict[str, Any]:
    """What process.json says of the models."""
    goal = made.goal
    return {
        "members": [n for n in goal.model.members if n not in ("mean", "ridge", "gp")],
        "targets": {
            name: {
                "weights": dict(f.model.weights),
                "coverage": f.coverage,
                "coverage_over_time": list(f.over_time),
                "left_out": dict(f.left_out),
                "scores": {m: [s.__dict__ for s in scores] for m, scores in f.scores.items()},
            }
            for name, f in made.fits.items()
        },
    }


def write_fitted(path: Path, fitted: Fitted) -> None:
    from safetensors.numpy import save_file

    arrays = {f"model/{n}": np.ascontiguousarray(a) for n, a in fitted.model.arrays().items()}
    arrays |= {f"held_out/{n}": a for n, a in fitted.held_out.items()}
    arrays |= {f"spread/{n}": a for n, a in fitted.spread.items()}
    temporary = path.with_suffix(".tmp")
    save_file(arrays, temporary)
    temporary.replace(path)


def read_fitted(path: Path, name: str) -> Fitted | None:
    from safetensors.numpy import load_file

    if not path.exists():
        return None
    parts: dict[str, dict[str, np.ndarray]] = {"model": {}, "held_out": {}, "spread": {}}
    for key, array in load_file(path).items():
        part, _, rest = key.partition("/")
        parts[part][rest] = array
    return Fitted(KINDS[name](parts["model"]), parts["held_out"], parts["spread"])
