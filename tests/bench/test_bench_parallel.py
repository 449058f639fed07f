"""`bagu bench parallel`: ratios of rates by round, and a run on real ranks with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagu.bench import parallel
from bagu.bench.options import ParallelBench
from bagu.bench.train_shapes import Shape
from bagu.errors import ArgumentError, UnknownName
from bagu.nn.config import ModelConfig
from benchmarks.tools import parallel_table

TINY = Shape(
    why="tiny",
    model=ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=64,
        max_len=16,
    ),
    lengths=(16,) * 4,
)  # fmt: skip


def test_the_ratio_is_that_of_each_round() -> None:
    """Two ranks of 64 tokens. Round 1: 64 + 32 tokens/s alone, 128 / 2 s together; round 2 is ten times slower."""
    first = {parallel.ALONE: [1.0, 10.0], parallel.MESH: [1.5, 20.0]}
    second = {parallel.ALONE: [2.0, 20.0], parallel.MESH: [2.0, 16.0]}
    found = parallel.summary([first, second], TINY)
    assert (found["ranks"], found["tokens"], found["rounds"]) == (2, 128, 2)
    assert [found[key] for key in ("ratio", "low_ratio", "high_ratio")] == pytest.approx([2 / 3] * 3)
    assert found["alone_tokens_per_s"] == pytest.approx((96 + 9.6) / 2)


@pytest.mark.slow
def test_it_times_two_ranks_and_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(parallel.SHAPES, "tiny", TINY)
    assert parallel.main(ParallelBench(shape="tiny", rounds=2, out=tmp_path)) == 0
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["ranks"], r["tokens"], r["rounds"]) for r in rows] == [(2, 64, 2), (1, 32, 2)]
    assert all(0 < r["low_ratio"] <= r["ratio"] <= r["high_ratio"] for r in rows)


@pytest.mark.parametrize("options", [{"ranks": 1}, {"ranks": 3}, {"rounds": 0}])
def test_numbers_that_cannot_be_timed_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=r"ranks, .* rounds"):
        parallel.main(ParallelBench(**options))
    with pytest.raises(UnknownName):
        parallel.main(ParallelBench(shape="cpu_7m"))


def row(ranks: int, ratio: float, time: str) -> dict[str, Any]:
    return {
        "system": "parallel", "shape": "cpu_6m", "ranks": ranks, "tokens": 4096, "rounds": 6,
        "alone_tokens_per_s": 1300.4, "low_ratio": 0.9,
        "mesh_tokens_per_s": 1250.0, "ratio": ratio, "high_ratio": 1.0,
        "env": {"machine": "box", "commit": "0123456789abcdef", "time": time},
    }  # fmt: skip


def test_the_table_has_the_latest_row_of_each_number_of_ranks() -> None:
    server = row(2, 0.777, "2026-01-04") | {"system": "parameter server"}  # in the same folder
    text = parallel_table.render(
        [row(2, 0.5, "2026-01-01"), row(1, 0.999, "2026-01-02"), row(2, 0.961, "2026-01-03"), server]
    )
    assert "| box | `cpu_6m`, 4,096 tokens a step | 2 | 1,300 | 1,250 | **0.961** (0.900 to 1.000) | 6 |" in text
    assert "**0.999**" in text and "**0.500**" not in text and "0.777" not in text and "`012345678`" in text
    assert text.index("0.961") < text.index("0.999")
