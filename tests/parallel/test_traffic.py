"""Bytes and memory against their formulas: the ring, and every mode of training."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import Ranks
from tiny import Case

from bagu.parallel.explain import compare_bytes, explain, step_bytes
from bagu.parallel.mesh import MeshConfig, open_mesh
from bagu.parallel.ring import ring_all_reduce
from bagu.parallel.traffic import Tally, sent_bytes
from bagu.parallel.zero import model_state_bytes
from bagu.train import TrainState, step

WIDE = {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 512, "head_dim": 64}  # 0.6M parameters


def ring(ranks: int, size: int) -> tuple[bool, bool, int]:
    """Whether the ring's sum is the library's and the exact one, and the bytes sent."""
    mesh = open_mesh(MeshConfig(dp=ranks), tiny.CPU)
    mine = torch.arange(size, dtype=torch.float64) * (mesh.rank + 1)  # integers: sums are exact in any order
    theirs = mine.clone()
    ring_all_reduce(mesh, mine, "dp")
    dist.all_reduce(theirs)
    whole = torch.arange(size, dtype=torch.float64) * sum(range(1, ranks + 1))
    return torch.equal(mine, theirs), torch.equal(mine, whole), mesh.traffic.sent


@pytest.mark.parametrize("size", [4096, 13, 2])
def test_the_ring_equals_the_library_and_sends_two_n_minus_one_over_n(size: int, two: Ranks, four: Ranks) -> None:
    for number, group in ((2, two), (4, four)):
        found = group.run(ring, number, size)
        assert all(same and exact for same, exact, _ in found)
        assert sum(sent for *_, sent in found) == number * 2 * (number - 1) * size * 8 / number  # over all ranks: exact
        if size % number == 0:
            assert {sent for *_, sent in found} == {sent_bytes("all_reduce", size * 8, number)}


def measure(case: Case) -> dict[str, Any]:
    """The bytes of one step (after a first one), and the bytes of the states that this rank holds."""
    config, model = tiny.config(case, alone=False), tiny.model(case)
    mesh = open_mesh(config.mesh, tiny.CPU)
    state, data = TrainState(model, config, mesh=mesh), tiny.loader(case.micro_batches)
    step(state, data.batch(0))
    before = dict(mesh.traffic.tallies)
    step(state, data.batch(1))
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(state)}
    return {
        "sent": sum(t.sent for t in mesh.traffic.since(before).values()),
        "states": sum(storages.values()),
        "parameters": sum(p.numel() for p in model.parameters()),
        "root": sum(p.numel() for n, p in model.named_parameters() if not n.startswith("blocks.")),
    }


def tensors(state: TrainState) -> list[torch.Tensor]:
    """Parameters, masters, gradients, optimizer state: whatever this rank holds between two steps."""
    held = [p.data for p in state.model.parameters() if p.untyped_storage().nbytes()]
    held += [state.flat.master, state.flat.grad]
    return held + [t for part in state.optimizer.parts for t in part.state.values()]


MODES = [
    Case(name="data parallel", mesh="dp=4"),
    Case(name="zero 1", mesh="shard=4", zero=1),
    Case(name="zero 2", mesh="shard=4", zero=2),
    Case(name="zero 3", mesh="shard=4", zero=3),
    Case(name="hybrid 2", mesh="dp=2,shard=2", zero=2),
    Case(name="hybrid 3", mesh="dp=2,shard=2", zero=3),
]


@pytest.mark.parametrize("micro_batches", [4, 8])
@pytest.mark.parametrize("case", MODES, ids=lambda c: c.name)
def test_bytes_of_a_step_are_those_of_the_formula(case: Case, micro_batches: int, four: Ranks) -> None:
    """Within 1 %: what is left are the padding of parameters and the scalars of a step."""
    wide = Case(name="", mesh=case.mesh, zero=case.zero, model=WIDE, micro_batches=micro_batches, dtype=torch.float32)
    mesh = MeshConfig.parse(case.mesh)
    for found in four.run(measure, wide):
        predicted = step_bytes(
            found["parameters"], root=found["root"], mesh=mesh, stage=case.zero or 0, compute_bytes=4,
            backwards=micro_batches // 4,
        )  # fmt: skip
        assert found["sent"] == pytest.approx(sum(predicted.values()), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", MODES[:4], ids=lambda c: c.name)
def test_states_of_a_rank_are_those_of_the_formula(case: Case, dtype: torch.dtype, four: Ranks) -> None:
    """Within 3 % at four ranks; the root of stage 3 is freed after a step too."""
    wide = Case(name="", mesh=case.mesh, zero=case.zero, model=WIDE, dtype=dtype)
    for found in four.run(measure, wide):
        predicted = model_state_bytes(
            found["parameters"], stage=case.zero or 0, ranks=MeshConfig.parse(case.mesh).shard,
            compute_bytes=dtype.itemsize,
        )  # fmt: skip
        assert found["states"] == pytest.approx(predicted, rel=0.03)


def test_a_divided_muon_gathers_its_matrices_too(four: Ranks) -> None:
    optimizer = {"kind": "muon", "newton_schulz_dtype": "fp32"}
    case = Case(name="", mesh="shard=4", zero=3, model=WIDE, dtype=torch.float32, optimizer=optimizer)
    for found in four.run(measure, case):
        predicted = step_bytes(
            found["parameters"], root=found["root"], mesh=MeshConfig(shard=4), stage=3, compute_bytes=4, backwards=1,
            whole_matrices=found["parameters"] - found["root"],
        )  # fmt: skip
        assert found["sent"] == pytest.approx(sum(predicted.values()), rel=0.01)


def test_the_explanation_names_what_is_divided_and_sent() -> None:
    mesh = MeshConfig(dp=2, shard=2)
    predicted = step_bytes(1000, root=0, mesh=mesh, stage=2, compute_bytes=2, backwards=3)
    text = "\n".join(
        explain(mesh, 2, states=model_state_bytes(1000, stage=2, ranks=2, compute_bytes=2), predicted=predicted)
    )
    assert "dp=2,shard=2: 4 ranks" in text and "rank 3   dp 1  shard 1" in text
    assert "ZeRO-2: masters, optimizer state and gradients are divided: 10 kB a rank" in text
    assert "reduce_scatter over shard: 6 kB" in text  # three micro-batches of 4000 bytes, half of each
    counted = {("reduce_scatter", "shard"): Tally(calls=6, size=24000, sent=12000)}
    lines = compare_bytes(counted, predicted, steps=2)
    assert any(line.startswith("reduce_scatter shard") and line.endswith("1.0000") for line in lines)
