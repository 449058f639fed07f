"""`bagu bench train`: the settings that it times do not share memory. The table that all benchmarks print."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bagu import ops
from bagu.bench import train
from bagu.bench.harness import Rows, table
from bagu.bench.options import BenchSetting, TrainBench
from bagu.bench.train_shapes import Shape
from bagu.nn.config import ModelConfig
from bagu.runs.record import read_rows
from bagu.train.state import TrainState

TINY = ModelConfig(vocab_size=64, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8,
                   intermediate_size=32, max_len=16)  # fmt: skip


@pytest.mark.slow
def test_the_state_of_one_setting_is_gone_before_the_next_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the peak memory of a setting is at least two sets of model states."""
    states: weakref.WeakSet[TrainState] = weakref.WeakSet()
    alive: list[int] = []

    class Tracked(TrainState):
        def __init__(self, *args: Any) -> None:
            alive.append(len(states))
            super().__init__(*args)
            states.add(self)

    monkeypatch.setattr(train, "TrainState", Tracked)
    monkeypatch.setitem(train.SHAPES, "tiny", Shape(why="a test", model=TINY, lengths=(16,) * 4))
    setting = BenchSetting(dtype="fp32", device="cpu", out=tmp_path, as_json=True)
    train.main(TrainBench(shape="tiny", steps=1, micro_batches=(1, 2, 4), fp8=True), setting)
    assert alive == [0] * 6
    (file,) = tmp_path.iterdir()
    found = [(row["implementation"], row["micro_batches"]) for row in read_rows(file)]
    assert found == [(name, m) for name in ("bagu", "bagu fp8") for m in (1, 2, 4)]


def test_the_flash_attention_peer_runs_only_attention_on_the_torch_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: list[tuple[str, str | None]] = []
    attention, rms_norm = ops.attention, ops.rms_norm
    monkeypatch.setattr(ops, "attention", _recorded("attention", attention, backends))
    monkeypatch.setattr(ops, "rms_norm", _recorded("rms_norm", rms_norm, backends))
    monkeypatch.setitem(train.SHAPES, "tiny", Shape(why="a test", model=TINY, lengths=(16,) * 4))
    before = ops.attention
    setting = BenchSetting(dtype="fp32", device="cpu", out=tmp_path, as_json=True)
    train.main(TrainBench(shape="tiny", steps=1, peer=("flash-attention",)), setting)
    assert ops.attention is before
    assert dict.fromkeys(backends) == dict.fromkeys([("rms_norm", None), ("attention", None), ("attention", "torch")])
    (file,) = tmp_path.iterdir()
    assert [row["implementation"] for row in read_rows(file)] == ["bagu", "flash-attention"]


def _recorded(name: str, op: Callable[..., Any], calls: list[tuple[str, str | None]]) -> Callable[..., Any]:
    def call(*args: Any, backend: str | None = None, **rest: Any) -> Any:
        calls.append((name, backend))
        return op(*args, backend=backend, **rest)

    return call


def test_a_table_has_every_column_with_a_number_on_a_narrow_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    heads = ["implementation", *(f"number {i}" for i in range(9)), "nowhere"]
    Rows(tmp_path, default=None, as_json=False).finish(table("title", heads, [["bagu", *["1,234.5"] * 9, "–"]]))
    shown = capsys.readouterr().out
    assert shown.count("1,234.5") == 9 and "nowhere" not in shown and "…" not in shown
