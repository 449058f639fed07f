"""Ranks decide together: what one of them sees, all of them act on."""

from __future__ import annotations

from dataclasses import replace

import lockstep
import pytest
from ranks import Ranks
from tiny import Case

from bagu.nn.config import NormConfig

HEADS = {"num_kv_heads": 2}
MODES = [
    Case(name="data parallel", micro_batches=2),
    Case(name="zero 3", mesh="shard=2", zero=3, micro_batches=2),
    *(Case(name=name, mesh=f"{name}=2", micro_batches=2, model=HEADS) for name in ("tp", "cp", "pp")),
]


@pytest.mark.parametrize("case", MODES, ids=lambda c: c.name)
def test_a_step_that_is_bad_on_one_rank_is_skipped_by_all(case: Case, two: Ranks) -> None:
    """Rank 0 reports the loss of tp, which is good there: its gradients are not."""
    reason = "the gradient norm is nan" if case.name == "tp" else "the loss is nan"
    assert two.run(lockstep.poisoned, case) == [([None, reason, None], [2, 3])] * 2


@pytest.mark.parametrize("case", MODES, ids=lambda c: c.name)
def test_ranks_evaluate_and_sample_together(case: Case, two: Ranks) -> None:
    case = replace(case, name="", steps=3, options={"eval_every": 1, "sample_every": 1})
    (losses, texts), (silent, nothing) = two.run(lockstep.evaluated, case, alone=False)
    alone, _ = lockstep.evaluated(case, alone=True)
    assert losses == pytest.approx(alone, rel=1e-10)
    assert texts.keys() == {0, 1, 2} and not silent and not nothing, "rank 0 alone reports"


def test_ctrl_c_on_one_rank_stops_all_after_the_same_step(two: Ranks) -> None:
    """It comes during step 3 (one micro-batch a rank), and the ranks agree on it in step 4 at the latest."""
    case = Case(name="", micro_batches=2, steps=50)
    found = two.run(lockstep.interrupted, case)
    assert found[0] == found[1] and found[0][0] and found[0][1] <= 4


def test_batch_norm_and_data_parallelism_are_refused(two: Ranks) -> None:
    case = Case(name="", model={"norm": NormConfig(kind="batch")})
    assert all(
        "batch norm and data parallelism do not go together" in said for said in two.run(lockstep.batch_norm, case)
    )


def test_stage_3_holds_no_parameters_between_steps(two: Ranks) -> None:
    for held, _, whole in two.run(lockstep.memory, Case(name="", mesh="shard=2", zero=3)):
        assert held == 0 and whole > 0


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_a_divided_model_holds_its_part_only(mesh: str, two: Ranks) -> None:
    """The caller's model has no memory until the end. Norms and padding are left over half; of pp, the tied table."""
    case = Case(name="", mesh=mesh, model={**HEADS, "tie_embeddings": False, "intermediate_size": 192})
    for held, part, whole in two.run(lockstep.memory, case):
        assert held == 0 and part < 0.6 * whole


def test_a_rank_that_fails_does_not_wait_for_the_others(two: Ranks) -> None:
    for said in two.run(lockstep.failing, Case(name="", mesh="tp=2", model=HEADS)):
        assert said == "a bug, 0 parameters"
