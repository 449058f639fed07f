"""Objectives whose batches do not depend on the model hold under a mesh: the metrics are those of one process."""

from __future__ import annotations

from pathlib import Path

import objectives
import pytest
from ranks import Ranks

from bagu.config import override
from bagu.recipes.models import load_model
from tests.fresh_cache import fresh_cache

MESHES = {
    "sft": ["train.mesh.dp=2", "train.mesh.tp=2", "train.mesh.pp=2", "train.mesh.cp=2"],
    "mlm": ["train.mesh.shard=2", "train.mesh.tp=2", "train.mesh.cp=2 train.context_parallel=ulysses"],
    "distill": ["train.mesh.shard=2 train.zero=3"],
    "dpo": [
        "train.mesh.shard=2 train.zero=3",
        "train.mesh.ep=2",
        "train.mesh.shard=2 train.zero=3 objective.reference=live",
    ],
    "reward": ["train.mesh.dp=2", "train.mesh.shard=2 train.zero=3"],
}


@pytest.mark.parametrize("kind", [k if k == "sft" else pytest.param(k, marks=pytest.mark.slow) for k in MESHES])
def test_an_objective_has_the_metrics_of_one_process(
    kind: str, two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms, held-out metrics of four steps in fp32; reference log-probabilities are cached once."""
    monkeypatch.setenv("BAGU_CACHE", fresh_cache(tmp_path / "cache"))
    run = objectives.make(tmp_path, kind)
    objectives.go(run, tmp_path / "alone", alone=True)
    alone = objectives.rows_of(tmp_path / "alone")
    weights = dict(load_model(tmp_path / "alone").named_parameters())
    for number, settings in enumerate(MESHES[kind]):
        out = tmp_path / f"ranks-{number}"
        hollow = two.run(objectives.go, override(run, settings.split()), out, alone=False)
        assert hollow[0] is False and ("zero=3" not in settings or hollow[1] is ("live" not in settings)), settings
        ranks = objectives.rows_of(out)
        assert len(alone) == len(ranks) == 4
        for one, other in zip(alone, ranks, strict=True):
            assert one.keys() == other.keys(), settings
            for name, value in one.items():
                assert other[name] == (None if value is None else pytest.approx(value, rel=1e-5, abs=1e-6)), name
        for name, p in load_model(out).named_parameters():
            assert (p - weights[name]).abs().max() < 1e-5, (settings, name)
