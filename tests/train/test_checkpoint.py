"""Checkpoints: whole or absent, checked before they are used, and the one before when they are not."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny_run import Notes, loader, model

from bagu.errors import ArgumentError
from bagu.nn.config import MoEConfig
from bagu.train import OptimizerConfig, TrainConfig, TrainState, checkpoint, fit, loop, step
from bagu.train.checkpoint import CheckpointError
from bagu.train.checkpoint.saving import Saver

CONFIG = TrainConfig(steps=6, optimizer=OptimizerConfig(lr=0.01), save_every=2, keep_last=3)
FACTS: dict[str, Any] = {"val_loss_nats": None}


def trained(steps: int = 2, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> TrainState:
    state, data = TrainState(model(dtype, **changes), CONFIG), loader()
    for s in range(steps):
        step(state, data.batch(s))
    return state


def everything(state: TrainState) -> dict[str, torch.Tensor]:
    return {**state.flat.masters(), **state.optimizer.tensors(), **state.model.state_dict()}


def assert_same(a: TrainState, b: TrainState) -> None:
    assert (a.step, a.data_step, a.guard.state()) == (b.step, b.data_step, b.guard.state())
    left, right = everything(a), everything(b)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[n], right[n]) for n in left)


def damage(path: Path, how: str) -> None:
    file = path / "optimizer.safetensors"
    if how == "flipped bit":
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    elif how == "cut":
        os.truncate(file, file.stat().st_size - 8)
    elif how == "missing file":
        file.unlink()
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "torn manifest":
        os.truncate(path / "manifest.json", 20)


DAMAGES = ["flipped bit", "cut", "missing file", "no manifest", "torn manifest"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_restores_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_size=16, bias_rate=0.01)  # a buffer that is learned, too
    state = trained(dtype=dtype, moe=moe)
    path = checkpoint.write(tmp_path, checkpoint.snapshot(state, FACTS))
    checkpoint.verify(path)
    fresh = TrainState(model(dtype, moe=moe), CONFIG)
    checkpoint.restore(path, fresh)
    assert_same(fresh, state)
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".pt", ".bin", ".pkl", ".pickle")]
    assert safetensors.torch.load_file(path / "model.safetensors").keys() >= state.flat.masters().keys()


def test_a_snapshot_does_not_move_with_the_run(tmp_path: Path) -> None:
    state, data = trained(dtype=torch.float32), loader()
    snap = checkpoint.snapshot(state, FACTS)
    before = {n: t.clone() for n, t in snap.model.items()}
    step(state, data.batch(2))
    assert all(torch.equal(snap.model[n], before[n]) for n in before)


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_is_found(tmp_path: Path, how: str) -> None:
    path = checkpoint.write(tmp_path, checkpoint.snapshot(trained(), FACTS))
    damage(path, how)
    with pytest.raises(CheckpointError, match="step-000000002"):
        checkpoint.verify(path)


@pytest.mark.parametrize("how", ["flipped bit", "no manifest"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path: Path, how: str) -> None:
    first = fit(CONFIG, whole := model(), loader(), folder=tmp_path)
    assert first.checkpoint is not None and first.checkpoint.name == "step-000000006"
    damage(first.checkpoint, how)
    (tmp_path / ".partial-step-000000008").mkdir()  # what a kill leaves
    notes, again = Notes(), model()
    with pytest.warns(RuntimeWarning, match="step-000000006"):
        fit(CONFIG, again, loader(), folder=tmp_path, resume=True, observers=[notes])
    assert [e["path"] for e in notes.of("bad_checkpoint")] == ["step-000000006"]
    assert [e["checkpoint"] for e in notes.of("resume")] == ["step-000000004"]
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["bad-step-000000006", *(f"step-{s:09d}" for s in (2, 4, 6))]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_no_usable_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    fit(dataclasses.replace(CONFIG, keep_last=1), model(), loader(), folder=tmp_path)
    damage(next(tmp_path.glob("step-*")), "cut")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    for _ in range(2):  # the second time too: a refusal must not make the folder look new
        with pytest.raises(CheckpointError, match="none of the 1"):
            fit(CONFIG, model(), loader(), folder=tmp_path, resume=True)
        assert sorted(p.name for p in tmp_path.rglob("*")) == before


def test_a_bad_checkpoint_takes_the_place_of_a_bad_one_of_the_same_step(tmp_path: Path) -> None:
    for _ in range(2):
        fit(CONFIG, model(), loader(), folder=tmp_path, resume=True)
        damage(tmp_path / "step-000000006", "cut")
        with pytest.warns(RuntimeWarning, match="step-000000006"):
            fit(dataclasses.replace(CONFIG, steps=4), model(), loader(), folder=tmp_path, resume=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad-step-000000006", "step-000000002", "step-000000004"]


def test_begin_is_called_when_all_is_checked_and_before_anything_is_written(tmp_path: Path) -> None:
    fit(dataclasses.replace(CONFIG, steps=4), model(), loader(), folder=tmp_path)
    (tmp_path / ".partial-step-000000008").mkdir()  # what a kill leaves
    before, seen, notes = sorted(p.name for p in tmp_path.rglob("*")), [], Notes()

    def begin(step: int) -> list[Notes]:
        seen.append((step, sorted(p.name for p in tmp_path.rglob("*"))))
        return [notes]

    with pytest.raises(CheckpointError, match="model of this run"):
        fit(CONFIG, model(), loader(), folder=tmp_path, resume=True, begin=begin, identity={"model": "other"})
    assert seen == [] and sorted(p.name for p in tmp_path.rglob("*")) == before
    fit(CONFIG, model(), loader(), folder=tmp_path, resume=True, begin=begin)
    assert seen == [(4, before)]
    assert list(notes.rows) == [4, 5]


def test_last_few_and_best_are_kept(tmp_path: Path) -> None:
    losses = iter([3.0, 1.0, 2.0, 4.0, 5.0])
    config = TrainConfig(steps=5, save_every=1, eval_every=1, keep_last=2, keep_best=True)
    fit(config, model(), loader(), folder=tmp_path, evaluate=lambda _: {"val_loss_nats": next(losses)})
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == [f"step-{s:09d}" for s in (2, 4, 5)]


@pytest.mark.parametrize("broken", ["absent", "not JSON", "no score"])
def test_checkpoints_without_a_score_are_pruned_beside_the_best(tmp_path: Path, broken: str) -> None:
    """One whose state.json was gone ended every pruning after it."""
    config = TrainConfig(steps=2, save_every=1, eval_every=1, keep_last=2, keep_best=True)
    losses = iter([3.0, 2.0, 1.0, 4.0, 5.0])
    evaluate = lambda _: {"val_loss_nats": next(losses)}  # noqa: E731
    fit(config, model(), loader(), folder=tmp_path, evaluate=evaluate)
    state = tmp_path / "step-000000001" / "state.json"
    state.unlink() if broken == "absent" else state.write_text("{}" if broken == "no score" else "{")
    fit(dataclasses.replace(config, steps=5), model(), loader(), folder=tmp_path, evaluate=evaluate, resume=True)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == [f"step-{s:09d}" for s in (3, 4, 5)]


@pytest.fixture
def small_files() -> Iterator[Any]:
    """A file may not grow past a limit: the write fails part of the way, as on a full disk."""
    resource = pytest.importorskip("resource")
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_costs_one_save_and_not_the_run(
    tmp_path: Path, small_files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, filled, savers = Notes(), iter([False, True, False]), []
    monkeypatch.setattr(loop, "Saver", lambda *a, **k: savers.append(Saver(*a, **k)) or savers[-1])

    def evaluate(_: object) -> dict[str, float]:  # runs before each save
        savers[0].wait()  # the limit must not change during the save before, which runs in another thread
        small_files(20_000 if next(filled) else 10**9)
        return {}

    config = dataclasses.replace(CONFIG, eval_every=2)
    saved_before = []

    class Watch(Notes):
        def on_event(self, kind: str, step: int, **facts: Any) -> None:
            if kind == "save_failed":
                saved_before.extend(checkpoint.checkpoints(tmp_path))
            notes.on_event(kind, step, **facts)

    with pytest.warns(RuntimeWarning, match="checkpoint of step 4 was not written"):
        result = fit(config, model(), loader(), folder=tmp_path, evaluate=evaluate, observers=[Watch()])
    assert result.step == 6
    assert [(e["kind"], e["step"]) for e in notes.events] == [("save", 2), ("save_failed", 4), ("save", 6)]
    assert "too large" in notes.of("save_failed")[0]["reason"]
    assert saved_before[0].name == "step-000000002"
    checkpoint.verify(saved_before[0])
    assert not list(tmp_path.glob(".partial-*"))


def test_a_last_save_that_fails_is_an_error(tmp_path: Path, small_files: Any) -> None:
    small_files(20_000)
    with pytest.raises(CheckpointError, match="step 2 was not written"), pytest.warns(RuntimeWarning):
        fit(dataclasses.replace(CONFIG, steps=2), model(), loader(), folder=tmp_path)


def test_at_most_one_save_is_in_flight_and_none_is_forgotten(tmp_path: Path) -> None:
    state, saver = trained(), Saver(tmp_path, keep_last=9, keep_best=False)
    for s in (1, 2, 3):
        state.step = s
        saver.save(lambda: checkpoint.snapshot(state, FACTS))
    saver.close()
    assert [(d.step, d.error) for d in saver.finished()] == [(1, None), (2, None), (3, None)]
    assert [checkpoint.state_of(p)["step"] for p in checkpoint.checkpoints(tmp_path)] == [1, 2, 3]


def test_another_model_or_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    path = checkpoint.write(tmp_path, checkpoint.snapshot(trained(), FACTS))
    with pytest.raises(CheckpointError, match=r"blocks\.2\S* is missing"):
        checkpoint.restore(path, TrainState(model(torch.bfloat16, num_layers=3), CONFIG))
    with pytest.raises(CheckpointError, match=r"is \[64, 32\], here \[65, 32\]"):
        checkpoint.restore(path, TrainState(model(torch.bfloat16, vocab_size=65), CONFIG))
    lion = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(kind="lion"))
    with pytest.raises(CheckpointError, match="has no place in this run"):
        checkpoint.restore(path, TrainState(model(torch.bfloat16), lion))


def test_frozen_weights_must_be_the_same(tmp_path: Path) -> None:
    def frozen(add: float) -> TrainState:
        m = model()
        m.head_weight.requires_grad_(False).add_(add)
        return TrainState(m, CONFIG)

    path = checkpoint.write(tmp_path, checkpoint.snapshot(frozen(0.0), FACTS))
    checkpoint.restore(path, frozen(0.0))
    with pytest.raises(CheckpointError, match="frozen weights"):
        checkpoint.restore(path, frozen(0.1))


def test_another_tokenizer_is_refused_and_another_config_is_told(tmp_path: Path) -> None:
    fit(CONFIG, model(), loader(), folder=tmp_path, identity={"tokenizer": "aa"})
    with pytest.raises(CheckpointError, match="the tokenizer of this run is bb"):
        fit(CONFIG, model(), loader(), folder=tmp_path, resume=True, identity={"tokenizer": "bb"})
    notes = Notes()
    longer = dataclasses.replace(CONFIG, steps=7)
    fit(longer, model(), loader(), folder=tmp_path, resume=True, identity={"tokenizer": "aa"}, observers=[notes])
    assert any(line.startswith("steps:") for line in notes.of("resume")[0]["changed"])
    with pytest.raises(ArgumentError, match="checkpoints of another run"):
        fit(CONFIG, model(), loader(), folder=tmp_path)


def test_state_json_says_where_the_data_goes_on(tmp_path: Path) -> None:
    fit(dataclasses.replace(CONFIG, steps=2), model(), loader(), folder=tmp_path)
    facts = json.loads((tmp_path / "step-000000002" / "state.json").read_text())
    assert facts["cursor"] == loader().cursor(2)
    assert facts["step"] == facts["data_step"] == 2
