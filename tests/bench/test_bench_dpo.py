"""`bagu bench dpo`: bagu and the plain loop train on the same pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bagu.bench import dpo
from bagu.bench.options import BenchSetting, DpoBench
from bagu.errors import ArgumentError, UnknownName
from bagu.nn.config import ModelConfig

MODEL = ModelConfig(
    vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=48,
    max_len=64,
)  # fmt: skip


@pytest.mark.slow
def test_it_reports_both_implementations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dpo, "preset", lambda name: MODEL)
    sizes = {"pairs": 3, "prompt": 5, "answer": 8, "steps": 2}
    setting = BenchSetting(dtype="fp32", device="cpu", out=tmp_path, as_json=True)
    assert dpo.main(DpoBench(shape="tiny", peer=("transformers",), **sizes), setting) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["implementation"] for row in rows] == ["bagu", "transformers"]
    assert all(row["pairs_per_s"] > 0 and row["pairs"] == 3 for row in rows)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1


def test_both_have_the_loss_of_a_policy_that_is_its_reference() -> None:
    """ln 2 at the first step, by packed and by padded pairs, also in several micro-batches."""
    pairs = dpo.random_pairs(6, 5, 8, MODEL.vocab_size)
    where = torch.device("cpu")
    with dpo.bagu_step(MODEL, pairs, where, torch.float32) as one_step:
        assert one_step() == pytest.approx(0.6931472)
    with dpo.plain_step(MODEL, pairs, where, torch.float32, compiled=False) as one_step:
        assert one_step() == pytest.approx(0.6931472)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ArgumentError, match="-1 pairs"):
        dpo.main(DpoBench(shape="cpu_6m", pairs=-1), BenchSetting(device="cpu"))
    with pytest.raises(UnknownName, match="peer"):
        dpo.main(DpoBench(shape="cpu_6m", peer=("transformer",)), BenchSetting(device="cpu"))
