"""A checkpoint does not depend on the mesh that wrote it: a run resumes on another one and ends with equal weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import resume
import torch
from ranks import Ranks
from tiny import Case

from bagu.train import checkpoint

WHOLE = Case(name="whole", mesh="dp=1", micro_batches=4, steps=6, model=resume.DROPOUT)
MUON = {"kind": "muon", "newton_schulz_dtype": "fp64"}


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("zero 3 on 4", "zero 2 on 2"),
        ("data parallel on 4", "zero 3 on 2"),
        ("zero 1 on 2", "one process"),
        ("one process", "hybrid zero 3 on 4"),
    ],
)
def test_a_run_resumes_on_another_mesh(first: str, second: str, two: Ranks, four: Ranks, tmp_path: Path) -> None:
    """With optimizer state, data cursor and random state; Muon's state too in the first case."""
    base = replace(WHOLE, optimizer=MUON) if first == "zero 3 on 4" else WHOLE
    cases = {
        "zero 3 on 4": (four, replace(base, mesh="shard=4", zero=3)),
        "data parallel on 4": (four, replace(base, mesh="dp=4")),
        "zero 1 on 2": (two, replace(base, mesh="shard=2", zero=1)),
        "zero 2 on 2": (two, replace(base, mesh="shard=2", zero=2)),
        "zero 3 on 2": (two, replace(base, mesh="shard=2", zero=3)),
        "hybrid zero 3 on 4": (four, replace(base, mesh="dp=2,shard=2", zero=3)),
        "one process": (None, base),
    }
    rows, weights = resume.go(None, base, alone=True)

    def leg(name: str, *, again: bool, pause_after: int | None) -> tuple[resume.Rows, dict[str, torch.Tensor]]:
        ranks, case = cases[name]
        options = {"alone": ranks is None, "resume": again, "pause_after": pause_after}
        if ranks is None:
            return resume.go(tmp_path, case, **options)
        found = ranks.run(resume.go, tmp_path, case, **options)
        assert all(not others.losses for others, _ in found[1:]), "rank 0 alone reports"
        for _, others in found[1:]:
            assert_equal_weights(found[0][1], others)
        return found[0]

    before, _ = leg(first, again=False, pause_after=3)
    after, ends = leg(second, again=True, pause_after=None)
    assert before.losses | after.losses == pytest.approx(rows.losses, rel=1e-10)
    assert_equal_weights(weights, ends)
    (resumed,) = [facts for kind, facts in after.events if kind == "resume"]
    assert any("mesh" in line for line in resumed["changed"])
    assert not list(tmp_path.glob(".partial*"))


def test_ranks_write_their_own_files_without_pickle(four: Ranks, tmp_path: Path) -> None:
    case = replace(WHOLE, mesh="dp=2,shard=2", zero=3, steps=2)
    four.run(resume.go, tmp_path, case, alone=False)
    (path,) = checkpoint.checkpoints(tmp_path)
    names = {"state.json", *(f"{k}-{i:05d}-of-00002.safetensors" for k in ("model", "optimizer") for i in range(2))}
    assert {p.name for p in path.iterdir()} == names | {"manifest.json"}
    checkpoint.verify(path)
    assert json.loads((path / "manifest.json").read_text())["files"].keys() == names
    sizes = [(path / f"optimizer-{i:05d}-of-00002.safetensors").stat().st_size for i in range(2)]
    assert abs(sizes[0] - sizes[1]) < 0.1 * sizes[0]


def test_another_models_checkpoint_is_refused_on_every_rank(two: Ranks, tmp_path: Path) -> None:
    case = replace(WHOLE, mesh="shard=2", zero=3, steps=2)
    two.run(resume.go, tmp_path, case, alone=False)
    other = replace(case, steps=4, model={"intermediate_size": 64})
    with pytest.raises(AssertionError) as error:
        two.run(resume.go, tmp_path, other, alone=False, resume=True)
    assert str(error.value).count("does not fit this run: ") == 2


def test_a_part_that_cannot_be_written_fails_the_save_and_not_the_run(tmp_path: Path) -> None:
    """Part 1 reports its error to part 0, whose save fails with it."""
    state = {"x": torch.ones(2)}

    def snap(part: int) -> checkpoint.Snapshot:
        return checkpoint.Snapshot(
            step=1, model=state, optimizer={}, facts={}, ready=None, part=part, parts=2, serial=1
        )

    bad = replace(snap(1), model={"x": torch.ones(2).to_sparse()})  # safetensors has no sparse tensors
    assert checkpoint.write(tmp_path, bad) is None
    with pytest.raises(checkpoint.CheckpointError, match="part 1 of 2: "):
        checkpoint.write(tmp_path, snap(0))
    assert list(tmp_path.iterdir()) == []
    assert checkpoint.write(tmp_path, snap(1)) is None
    assert checkpoint.write(tmp_path, snap(0)) is not None
