"""The trainer runs the `--mesh` line of a plan on four Gloo ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_bagu

from bagu.config import override
from bagu.errors import ArgumentError
from bagu.nn.config import ModelConfig, MoEConfig
from bagu.parallel.mesh import MeshConfig
from bagu.parallel.plan import best
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.explain import mesh_line
from bagu.parallel.planner.layouts import Workload
from bagu.parallel.planner.models import MODELS
from bagu.recipes.catalogue import recipe
from bagu.recipes.run import Run

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


WINDOWS = replace(MODELS["llama3-8b"], windows=(None, 4096))
SMALL_EXPERTS = replace(
    MODELS["llama_1b"], moe=MoEConfig(num_experts=8, top_k=2, expert_size=2048, aux_weight=0.01), num_layers=16
)
TWELVE = [
    *(MODELS[name] for name in ("cpu_6m", "gpt2_124m", "qwen3_0_6b", "llama_1b", "llama3-8b", "llama3-70b")),
    *(MODELS[name] for name in ("llama2-13b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3")), WINDOWS, SMALL_EXPERTS,
]  # fmt: skip


@pytest.mark.parametrize(
    "gpu", ["h100", *(pytest.param(x, marks=pytest.mark.slow) for x in ("4090", "a100-40gb", "a100", "b200"))]
)
def test_the_trainer_refuses_no_layout_that_is_printed(gpu: str) -> None:
    """The first sixteen lines of each plan; a larger cluster where the model does not fit."""
    tried = 0
    for model in TWELVE:
        seq = 8192 if model is WINDOWS else 2048
        workload = Workload(model=replace(model, max_len=max(model.max_len, seq)), seq=seq, batch=1024)
        for gpus in (8, 64, 1024):
            with contextlib.suppress(ArgumentError):
                for choice in best(workload, CLUSTERS[gpu], gpus).distinct(16):
                    line = mesh_line(choice.layout, workload.batch).split()
                    data = [word for word in line[3::2] if word.startswith("data.")]
                    run = replace(base(workload), train=override(base(workload), options(line)).train)
                    assert override(run, data).train.mesh.ranks == gpus, line
                    tried += 1
    assert tried > 300


def options(line: Sequence[str]) -> list[str]:
    """The settings of training in a `--mesh` line."""
    return [f"train.mesh.{part}" for part in line[1].split(",")] + [x for x in line[3::2] if x.startswith("train.")]


@functools.cache
def base(workload: Workload) -> Run:
    """A run of the model, with micro-batches that any mesh divides."""
    run = override(recipe("small"), [f"data.context={min(workload.seq, 64)}", "data.micro_batches=1024", "data.rows=1"])
    return replace(
        run, model=workload.model, data=replace(run.data, context=workload.seq, micro_batches=workload.batch)
    )


@pytest.mark.slow
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
