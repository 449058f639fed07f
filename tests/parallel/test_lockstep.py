"""Ranks decide together: what one of them sees, all of them act on."""

from __future__ import annotations

import lockstep
import pytest
from ranks import Ranks
from tiny import Case

from bagu.nn.config import NormConfig

MODES = [Case(name="data parallel", micro_batches=2), Case(name="zero 3", mesh="shard=2", zero=3, micro_batches=2)]


@pytest.mark.parametrize("case", MODES, ids=lambda c: c.name)
def test_a_step_that_is_bad_on_one_rank_is_skipped_by_all(case: Case, two: Ranks) -> None:
    assert two.run(lockstep.poisoned, case) == [([None, "the loss is nan", None], [2, 3])] * 2


@pytest.mark.parametrize("case", MODES, ids=lambda c: c.name)
def test_ranks_evaluate_and_sample_together(case: Case, two: Ranks) -> None:
    case = Case(
        name="", mesh=case.mesh, zero=case.zero, micro_batches=2, steps=3, options={"eval_every": 1, "sample_every": 1}
    )
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
    for held, whole in two.run(lockstep.memory, Case(name="", mesh="shard=2", zero=3)):
        assert held == 0 and whole > 0
