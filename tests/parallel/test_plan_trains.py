"""The trainer runs the `--mesh` line of a plan on four Gloo ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from ranks import run_bagu

from bagu.config import override
from bagu.nn.config import ModelConfig
from bagu.parallel.mesh import MeshConfig
from bagu.parallel.plan import best
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.explain import mesh_line
from bagu.parallel.planner.layouts import Workload
from bagu.recipes.catalogue import recipe

MODEL = ModelConfig(
    vocab_size=300, hidden_size=32, num_layers=4, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64,
    max_len=32,
)  # fmt: skip


SETTINGS = {f"model.{name}": getattr(MODEL, name) for name in (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "max_len"
)} | {
    "tokenizer.vocab_size": 300, "data.context": 32, "train.steps": 2, "train.eval_every": "null",
    "train.sample_every": "null", "dtype": "fp32", "dedup": "null", "data.packing": "joined",
}  # fmt: skip
WORKLOAD = Workload(model=MODEL, seq=32, batch=8)


def settings_of(line: Sequence[str]) -> list[str]:
    """The settings of a `--mesh` line, as `bagu train` makes them."""
    sizes = [f"train.mesh.{part}" for part in line[1].split(",")]
    return [*sizes, *(f"{name}={value}" for name, value in SETTINGS.items()), *line[3::2]]


def test_the_trainer_takes_every_line_of_a_plan() -> None:
    """Every layout that the planner considers for four GPUs: mesh, ZeRO, schedule, recomputation, micro-batches."""
    plan = best(WORKLOAD, CLUSTERS["h100"], 4)
    lines = {mesh_line(choice.layout, WORKLOAD.batch) for choice in plan.distinct(10_000)}
    meshes = {MeshConfig.parse(line.split()[1]) for line in lines}
    assert {(m.tp, m.pp) for m in meshes} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)}
    for line in lines:
        run = override(recipe("small"), settings_of(line.split()))
        assert run.train.mesh.ranks == 4 and run.data.rows_per_step == WORKLOAD.batch


@pytest.mark.skipif(os.name != "posix", reason="ranks are started with POSIX signals")
def test_four_ranks_train_with_the_mesh_of_a_plan(tmp_path: Path) -> None:
    """The whole command, with the fastest layout of the plan that has tensor and pipeline parallelism."""
    plan = best(WORKLOAD, CLUSTERS["h100"], 4)
    chosen = next(c for c in plan.distinct(1000) if c.layout.tp > 1 and c.layout.pp > 1)
    line = mesh_line(chosen.layout, WORKLOAD.batch).split()
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("\n\n".join(f"{i} and {i * i} are {i + i * i}. " * 5 for i in range(300)))
    flags = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    log = tmp_path / "log"
    codes = run_bagu(4, ["train", str(data), "--out", str(tmp_path / "run"), *line, *flags, "--explain"], log)
    said = log.read_text()
    assert codes == [0, 0, 0, 0], said
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    assert "model     rank 0 has " in said and "idle: " in said  # what is divided, and the drawn pipeline
    assert (tmp_path / "run" / "model" / "config.json").exists()
