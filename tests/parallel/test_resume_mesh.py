"""A checkpoint does not depend on the mesh that wrote it: a run resumes on another one and ends with equal weights."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import resume
import torch
from ranks import Ranks
from safetensors.torch import load_file
from tiny import Case

from bagu.nn.config import MoEConfig
from bagu.parallel.mesh import MeshConfig
from bagu.train import checkpoint
from bagu.train.checkpoint.saved_tensors import SavedTensors

WHOLE = Case(name="whole", mesh="dp=1", micro_batches=4, steps=4, model=resume.DROPOUT)
MUON = {"kind": "muon", "newton_schulz_dtype": "fp64"}


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-10, atol=1e-12)


def leg(
    folder: Path, where: tuple[Ranks | None, Case], *, again: bool, pause_after: int | None
) -> tuple[resume.Rows, dict[str, torch.Tensor]]:
    """A part of a run, on ranks or (None) in this process."""
    ranks, case = where
    if ranks is None:
        return resume.go(folder, case, alone=True, resume=again, pause_after=pause_after)
    found = ranks.run(resume.go, folder, case, alone=False, resume=again, pause_after=pause_after)
    assert all(not others.losses for others, _ in found[1:]), "rank 0 alone reports"
    for _, others in found[1:]:
        assert_equal_weights(found[0][1], others)
    return found[0]


def assert_resumes(
    folder: Path, base: Case, first: tuple[Ranks | None, Case], second: tuple[Ranks | None, Case]
) -> None:
    """Two steps on one mesh and two on another one are the run of one process."""
    rows, weights = resume.go(None, base, alone=True)
    before, _ = leg(folder, first, again=False, pause_after=2)
    after, ends = leg(folder, second, again=True, pause_after=None)
    assert before.losses | after.losses == pytest.approx(rows.losses, rel=1e-10)
    assert_equal_weights(weights, ends)
    (resumed,) = [facts for kind, facts in after.events if kind == "resume"]
    assert any("mesh" in line for line in resumed["changed"])
    assert not list(folder.glob(".partial*"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("zero 3 on 4", "zero 2 on 2"),
        pytest.param("data parallel on 4", "zero 3 on 2", marks=pytest.mark.slow),
        pytest.param("zero 1 on 2", "one process", marks=pytest.mark.slow),
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
    assert_resumes(tmp_path, base, cases[first], cases[second])


EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_size=16, bias_rate=0.01)  # its biases are buffers of the model
# an odd vocabulary is divided unequally, and one rank of tp has the bias of a product that is summed
DIVIDED = replace(WHOLE, model={"num_kv_heads": 2, "vocab_size": 65, "out_bias": True, "moe": EXPERTS})


@pytest.mark.parametrize(
    ("first", "second", "optimizer"),
    [
        pytest.param("tp=2", "shard=4", MUON, marks=pytest.mark.slow),
        ("pp=2", "one process", {}),
        ("tp=2,pp=2", "ep=2", {}),
        ("pp=2,shard=2", "tp=2", MUON),
        pytest.param("one process", "ep=2,shard=2", MUON, marks=pytest.mark.slow),
    ],
)
def test_a_run_of_a_divided_model_resumes_on_another_mesh(
    first: str, second: str, optimizer: dict[str, str], two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    base = replace(DIVIDED, optimizer=optimizer)

    def where(mesh: str) -> tuple[Ranks | None, Case]:
        if mesh == "one process":
            return None, base
        return {2: two, 4: four}[MeshConfig.parse(mesh).ranks], replace(base, mesh=mesh)

    assert_resumes(tmp_path, base, where(first), where(second))


@pytest.mark.parametrize(
    ("mesh", "parts"),
    [
        pytest.param("tp=2", 2, marks=pytest.mark.slow),
        ("pp=2", 2),
        ("cp=2", 1),
        ("ep=2,tp=2", 4),
        pytest.param("shard=2,tp=2", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_write_their_parts_of_the_checkpoint_of_one_process(
    mesh: str, parts: int, two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    """The same names, shapes and dtypes, and values that differ by the order of summation; each element once."""
    cp = {"context_parallel": "ulysses"} if "cp" in mesh else {}
    case = replace(DIVIDED, mesh=mesh, steps=2, options=cp)
    {2: two, 4: four}[MeshConfig.parse(mesh).ranks].run(resume.go, tmp_path / "ranks", case, alone=False)
    resume.go(tmp_path / "alone", case, alone=True)
    (ranks,), (alone,) = (checkpoint.checkpoints(tmp_path / name) for name in ("ranks", "alone"))
    checkpoint.verify(ranks)
    for kind in ("model", "optimizer"):
        files = sorted(ranks.glob(f"{kind}*.safetensors"))
        stored = [t for file in files for t in load_file(file).values()]
        with SavedTensors(alone, kind) as one, SavedTensors(ranks, kind) as other:
            assert one.shapes == other.shapes
            assert len(files) == parts and sum(t.numel() for t in stored) == sum(map(math.prod, one.shapes.values()))
            for name, shape in one.shapes.items():
                t, size = one.whole(name), math.prod(shape)
                assert other.whole(name).dtype == t.dtype
                torch.testing.assert_close(other.whole(name), t, rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(
                    other.read(name, size // 3, size), t.view(-1)[size // 3 :], rtol=1e-10, atol=1e-12
                )


def test_a_missing_part_of_a_divided_tensor_is_reported(two: Ranks, tmp_path: Path) -> None:
    two.run(resume.go, tmp_path, replace(DIVIDED, mesh="tp=2", steps=2), alone=False)
    (path,) = checkpoint.checkpoints(tmp_path)
    (path / "model-00001-of-00002.safetensors").unlink()
    with SavedTensors(path, "model") as saved, pytest.raises(ValueError, match=r"embedding\.weight lacks 1024 of 2080"):
        saved.whole("embedding.weight")


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
