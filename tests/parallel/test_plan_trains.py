"""The trainer runs the `--mesh` line of a plan on four Gloo ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from ranks import run_bagu

from bagu.nn.config import ModelConfig
from bagu.parallel.mesh import MeshConfig
from bagu.parallel.plan import best
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.explain import mesh_line
from bagu.parallel.planner.layouts import Workload

MODEL = ModelConfig(
    vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=64,
    max_len=32,
)  # fmt: skip


@pytest.mark.skipif(os.name != "posix", reason="ranks are started with POSIX signals")
def test_four_ranks_train_with_the_mesh_of_a_plan(tmp_path: Path) -> None:
    plan = best(Workload(model=MODEL, seq=32, batch=4), CLUSTERS["h100"], 4)
    # `bagu train` divides by dp and shard so far: the fastest layout of the plan that does
    chosen = next(c for c in plan.distinct(1000) if c.layout.tp == c.layout.cp == c.layout.pp == 1)
    line = mesh_line(chosen.layout).split()
    assert MeshConfig.parse(line[1]).ranks == 4
    sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
    settings = {f"model.{name}": getattr(MODEL, name) for name in (*sizes, "max_len")} | {
        "tokenizer.vocab_size": 300, "data.context": 32, "data.rows": 1, "data.micro_batches": 4, "train.steps": 2,
        "train.eval_every": "null", "train.sample_every": "null", "dtype": "fp32", "dedup": "null",
        "data.packing": "joined",
    }  # fmt: skip
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("\n\n".join(f"{i} and {i * i} are {i + i * i}. " * 5 for i in range(300)))
    flags = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    log = tmp_path / "log"
    codes = run_bagu(4, ["train", str(data), "--out", str(tmp_path / "run"), *line, *flags], log)
    assert codes == [0, 0, 0, 0], log.read_text()
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
