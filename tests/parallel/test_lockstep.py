"""Ranks decide together: what one of them sees, all of them act on."""

from __future__ import annotations

from dataclasses import replace

import lockstep
import pytest
from ranks import Ranks
from tiny import Case

from bagu.nn.config import MoEConfig, NormConfig
from tests.variants import of_cases

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


@pytest.mark.parametrize("case", of_cases(MODES, "data parallel", "tp", "pp"))
def test_ranks_evaluate_and_sample_together(case: Case, two: Ranks) -> None:
    case = replace(case, name="", steps=3, options={"eval_every": 1, "sample_every": 1})
    (losses, texts), (silent, nothing) = two.run(lockstep.evaluated, case, alone=False)
    alone, _ = lockstep.evaluated(case, alone=True)
    assert losses == pytest.approx(alone, rel=1e-10)
    assert texts.keys() == {0, 1, 2} and not silent and not nothing, "rank 0 alone reports"


EXPERTS = {"num_kv_heads": 2, "moe": MoEConfig(num_experts=4, top_k=2, expert_size=16, aux_weight=0.01)}
ULYSSES = {"context_parallel": "ulysses"}
PARTS = [
    Case(name="tp", mesh="tp=2", model={"num_kv_heads": 2, "vocab_size": 65}),
    Case(name="pp", mesh="pp=2", model={"tie_embeddings": True}),
    Case(name="zero bubble", mesh="pp=2", model={"num_layers": 4}, options={"pipeline": "zero_bubble"}),
    Case(name="ring", mesh="cp=2"),
    Case(name="ulysses", mesh="cp=2", model={"num_kv_heads": 2}, options=ULYSSES),
    Case(name="ep", mesh="ep=2", model=EXPERTS),
]
PARTS_OF_FOUR = [
    Case(name="zero 3 and tp", mesh="shard=2,tp=2", zero=3, model={"num_kv_heads": 2}),
    Case(name="pp and tp", mesh="pp=2,tp=2", model=EXPERTS),
    Case(name="cp and tp", mesh="cp=2,tp=2", model={"num_kv_heads": 2}),
    Case(name="pp and cp", mesh="pp=2,cp=2"),
]


def check_parts(case: Case, ranks: Ranks) -> None:
    """Held-out losses and samples of a divided model, of which no rank gathers the whole."""
    case = replace(case, name="", steps=2, options={**case.options, "eval_every": 1, "sample_every": 1})
    (losses, texts), *_ = ranks.run(lockstep.evaluated, case, alone=False, gathers=False, temperature=0.0)
    alone, wanted = lockstep.evaluated(case, alone=True, temperature=0.0)
    assert losses == pytest.approx(alone, rel=1e-10)
    assert texts == wanted


@pytest.mark.parametrize("case", of_cases(PARTS, "tp", "ring", "ep", "zero bubble"))
def test_two_ranks_evaluate_their_parts(case: Case, two: Ranks) -> None:
    check_parts(case, two)


@pytest.mark.parametrize("case", of_cases(PARTS_OF_FOUR, "cp and tp", "pp and cp"))
def test_four_ranks_evaluate_their_parts(case: Case, four: Ranks) -> None:
    check_parts(case, four)


@pytest.mark.parametrize("mesh", ["dp=2", "shard=2", "dp=2,tp=2"])
def test_a_rank_assembles_its_own_micro_batches(mesh: str, two: Ranks, four: Ranks) -> None:
    """Documents have unlike numbers of targets: the totals of a step come from all ranks."""
    case = Case(name="", mesh=mesh, steps=3, model=HEADS)
    found = (four if "tp" in mesh else two).run(lockstep.assembled, case, alone=False)
    numbers, losses = lockstep.assembled(case, alone=True)
    shares = [{0, 2}, {1, 3}] if len(found) == 2 else [{0, 2}, {0, 2}, {1, 3}, {1, 3}]
    assert numbers == {0, 1, 2, 3} and [own for own, _ in found] == shares
    assert found[0][1] == pytest.approx(losses, rel=1e-10)


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
