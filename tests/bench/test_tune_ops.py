"""The search of `bagu tune ops`, with simulated times: which candidates it measures, and its verdict."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bagu.bench import tune_ops
from bagu.bench.selection import MAX_ROUNDS, MIN_ROUNDS, select
from bagu.cli import main
from bagu.ops.catalogue import SPECS
from bagu.ops.tuning.store import Measurement, Store, Winner


def noisy(times: dict[str, float], spread: float, seed: int) -> object:
    draw = random.Random(seed)
    return lambda name: times[name] * draw.lognormvariate(0, spread)


def test_the_fastest_is_found_and_slow_candidates_are_dropped_early() -> None:
    times = {"default": 1.0, **{f"c{i}": 1.0 + 0.1 * i for i in range(1, 9)}, "best": 0.9}
    right, measured = 0, 0
    for seed in range(50):
        found = select("default", list(times)[1:], noisy(times, 0.02, seed))  # type: ignore[arg-type]
        right += found.winner == "best"
        measured += sum(map(len, found.samples.values()))
        assert found.winner is None or found.speedup == pytest.approx(1 / 0.9, abs=0.05)
    assert right == 50
    assert measured / 50 < 0.3 * MAX_ROUNDS * len(times)


def test_equal_candidates_have_no_winner() -> None:
    times = dict.fromkeys(("default", "a", "b", "c"), 1.0)
    wins = [select("default", ["a", "b", "c"], noisy(times, 0.05, seed)).winner for seed in range(100)]  # type: ignore[arg-type]
    assert sum(w is not None for w in wins) <= 8  # at 99 % confidence, and three comparisons with peeking


def test_a_deadline_ends_the_search() -> None:
    now = iter(range(10_000))
    found = select("a", ["b"], lambda name: 1.0, deadline=0.0, clock=lambda: float(next(now)))
    assert found.rounds == MIN_ROUNDS and found.winner is None


@pytest.fixture
def step() -> tune_ops.Step:
    spec = SPECS["transpose"]
    case = next(c for c in spec.cases if not c.bench)
    return next(iter(tune_ops.steps(spec, case, torch.float32, "cpu")))


def test_a_search_stores_every_measurement_and_the_checked_winner(step: tune_ops.Step, tmp_path: Path) -> None:
    store, space = Store(tmp_path / "store.jsonl"), tune_ops.space(step.spec, "forward")
    best = space[3]
    winner = tune_ops.tune(step, store, seconds=9, timer=lambda key: 0.8e-5 if key == best else 1e-5 + 1e-9 * len(key))
    records = list(store.records())
    assert records[-1] == winner and isinstance(winner, Winner)
    assert winner.options == dict(best) and winner.speedup == pytest.approx(1.25, rel=0.01)
    kept = [r for r in records if isinstance(r, Measurement)]
    assert len(kept) == len(space) + 1 and all(r.status == "ok" and r.median_s for r in kept)


def test_a_winner_with_wrong_results_is_not_used(
    step: tune_ops.Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, best = step.spec.module("triton"), tune_ops.space(step.spec, "forward")[0]
    right = module.forward

    def wrong(*args: Any, **more: Any) -> Any:
        return tuple(y + 1 for y in right(*args, **more)) if "rows" in more else right(*args, **more)

    monkeypatch.setattr(module, "forward", wrong)
    store = Store(tmp_path / "store.jsonl")
    winner = tune_ops.tune(step, store, seconds=9, timer=lambda key: 0.5e-5 if key == best else 1e-5)
    assert winner.options == {} and winner.speedup == 1.0
    assert [r.status for r in store.records() if isinstance(r, Measurement)].count("wrong") == 1


def test_the_commands_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], step: tune_ops.Step
) -> None:
    monkeypatch.setenv("BAGU_TUNING", str(tmp_path / "store.jsonl"))
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            main(["tune", "ops", "softmax"])
        assert "no CUDA device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["tune", "ops", "sofmax"])
    assert "'softmax'" in capsys.readouterr().err
    tune_ops.tune(step, Store(tmp_path / "store.jsonl"), seconds=9, timer=lambda key: 1e-5)
    for verb, words in (("report", "0 of 1 are faster"), ("missing", "found a tuning")):
        with pytest.raises(SystemExit):
            main(["tune", verb])
        assert words in capsys.readouterr().out
