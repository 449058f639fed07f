"""`bagu bench grpo` at its smallest: every phase is measured, and a wrong size is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagu.bench.grpo import main
from bagu.bench.options import BenchSetting, GrpoBench
from bagu.errors import ArgumentError, UnknownName


@pytest.mark.slow
def test_a_step_is_divided_into_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"prompts": 1, "samples": 2, "prompt": 4, "new": 2, "steps": 1}
    setting = BenchSetting(dtype="fp32", device="cpu", out=tmp_path, as_json=True)
    assert main(GrpoBench(shape="cpu_8m", **sizes), setting) == 0
    row = json.loads(capsys.readouterr().out)
    phases = sum(row[name] for name in ("rollout_s", "reward_s", "prepare_s", "update_s"))
    assert 0 < phases <= row["step_s"] and row["rollout_s"] > 0 and row["update_s"] > 0
    assert row["engine_tokens_per_s"] > 0 and row["rollout_tokens_per_s"] > 0 and row["swap_s"] > 0
    assert row["system"] == "grpo" and row["objective"]["samples"] == 2
    assert [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.open()] == [row]


def test_sizes_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ArgumentError, match="samples"):
        main(GrpoBench(samples=1), BenchSetting())
    with pytest.raises(UnknownName):
        main(GrpoBench(shape="cpu_9m"), BenchSetting())
