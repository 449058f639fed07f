"""Objectives whose batches do not depend on the model hold under a mesh: the metrics are those of one process."""

from __future__ import annotations

from pathlib import Path

import objectives
import pytest
from ranks import Ranks

from bagu.config import override
from bagu.recipes.models import load_model


@pytest.mark.parametrize(
    ("kind", "mesh"), [("sft", "dp"), ("mlm", "shard"), ("distill", "shard"), ("dpo", "shard"), ("reward", "dp")]
)
def test_an_objective_has_the_metrics_of_one_process(
    kind: str, mesh: str, two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, held-out metrics of four steps in fp32; reference log-probabilities are cached once."""
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "cache"))
    run = objectives.make(tmp_path, kind)
    objectives.go(run, tmp_path / "alone", alone=True)
    two.run(objectives.go, override(run, [f"train.mesh.{mesh}=2"]), tmp_path / "ranks", alone=False)
    alone, ranks = objectives.rows_of(tmp_path / "alone"), objectives.rows_of(tmp_path / "ranks")
    assert len(alone) == len(ranks) == 4
    for one, other in zip(alone, ranks, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == (None if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)), name
    one, other = (dict(load_model(tmp_path / name).named_parameters()) for name in ("alone", "ranks"))
    for name, p in one.items():
        assert (p - other[name]).abs().max() < 1e-5, name
