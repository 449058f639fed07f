"""Pipelines give the losses, gradients and weights of one process, for every schedule."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from shared_models import (
    EXACT,
    IGNORE,
    batch_of,
    config_of,
    gradients,
    loss_of,
    model_of,
    number_of_targets,
    one_process,
    open_cpu,
    worst,
)

from bagu import ops
from bagu.errors import BaguError
from bagu.nn.choices import MoEConfig, NormConfig
from bagu.nn.position_choices import Learned, T5Relative
from bagu.parallel.pipeline import (
    Action,
    Pipeline,
    Schedule,
    bubble,
    check_micro_batches,
    stages_of,
)
from bagu.parallel.spread import sum_ends
from bagu.parallel.stages import Costs, Stage, build, costs, cut
from bagu.types import Batch

LENGTHS = ((9, 1, 6), (16,), (8, 8), (3, 5, 8))  # of the documents of each micro-batch
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_embeddings": True, "positions": Learned(), "norm": NormConfig(kind="layer", bias=True)},
    "moe": {"moe": MoEConfig(num_experts=4, top_k=2, expert_size=8, aux_weight=0.1, dense_layers=(0,))},
}
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Result(NamedTuple):
    loss: float  # the difference from one process
    gradient: float
    names: list[str]
    actions: list[Action]
    sent: int


def as_batch(packed: Any, targets: torch.Tensor) -> Batch:
    ids, positions, cu_seqlens, max_len = packed
    return Batch(
        ids=ids, targets=targets, positions=positions, cu_seqlens=cu_seqlens, max_len=max_len,
        num_targets=int((targets != IGNORE).sum()), target_bytes=0,
    )  # fmt: skip


def pipeline_step(pipeline: Pipeline, batches: Any) -> float:
    """One step; the gradients are left in the parameters. Returns the loss of the whole pipeline."""
    total = number_of_targets(t for _, t in batches)
    loss = functools.partial(loss_of, total=total, values=ops.linear_cross_entropy)
    part = pipeline.step([as_batch(*b) for b in batches], loss, aux_scale=1 / len(batches))
    dist.all_reduce(part, group=pipeline.mesh.group("pp"))
    ends = [m for m in pipeline.modules.values() if m.is_first or m.is_last]
    if len(ends) == 1 and ends[0].tied:  # with zero_bubble both ends are on one rank
        sum_ends(pipeline.mesh, ends[0].embedding.weight.grad)  # type: ignore[arg-type]
    return float(part)


def compare(name: str, schedules: Sequence[Schedule]) -> dict[Schedule, Result]:
    config, batches = config_of(num_layers=4, **MODELS[name]), [batch_of(n, i) for i, n in enumerate(LENGTHS)]
    wanted_loss, wanted = one_process(model_of(config), batches)
    results = {}
    for schedule in schedules:
        mesh = open_cpu(pp=dist.get_world_size())
        mine = stages_of(schedule, mesh.coordinate("pp"), mesh.size("pp"), 2)
        modules = build(model_of(config), cut(costs(config, 16), mesh.size("pp") * len(mine)), mine)
        pipeline = Pipeline(modules, mesh, schedule=schedule, micro_batches=len(batches), tokens=16)
        loss = pipeline_step(pipeline, batches)
        found = {n: g for m in modules.values() for n, g in gradients(m).items()}
        results[schedule] = Result(
            abs(loss - wanted_loss), worst(found, {n: wanted[n] for n in found}), sorted(found), pipeline.actions,
            mesh.traffic.tallies["send", "pp"].sent,
        )  # fmt: skip
    return results


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_one_process(two: Ranks, name: str) -> None:
    answers = two.run(compare, name, SCHEDULES)
    for schedule in SCHEDULES:
        found = [answer[schedule] for answer in answers]
        assert all(max(f.loss, f.gradient) < EXACT for f in found), [f[:2] for f in found]
        names = {n for f in found for n in f.names}
        assert names == {n for n, _ in model_of(config_of(num_layers=4, **MODELS[name])).named_parameters()}
        check_actions(schedule, [f.actions for f in found])
        if name != "tied":
            check_bytes(schedule, [f.sent for f in found])


def check_actions(schedule: Schedule, actions: list[list[Action]]) -> None:
    """Every stage ran every micro-batch forward and backward once, and one action at a time."""
    stages = 2 * len(stages_of(schedule, 0, 2))
    every = [(s, m) for s in range(stages) for m in range(len(LENGTHS))]
    done = {k: sorted((a.stage, a.micro_batch) for r in actions for a in r if a.kind in k) for k in ("F", "BI", "BW")}
    assert done == {"F": every, "BI": every, "BW": every}
    for rank in actions:
        assert all(a.end <= b.start for a, b in itertools.pairwise(rank))
    assert 0 < bubble(actions) < 1


def check_bytes(schedule: Schedule, sent: list[int]) -> None:
    """A tensor [T, D] of fp64 per micro-batch, direction and boundary between two ranks."""
    tensor = 16 * 24 * 8
    boundaries = {"gpipe": 1, "1f1b": 1, "interleaved": 3, "zero_bubble": 2}[schedule]  # V: the middle one is local
    assert sum(sent) == 2 * boundaries * len(LENGTHS) * tensor


def test_four_stages_on_four_ranks(four: Ranks) -> None:
    for answer in four.run(compare, "tied", ("1f1b",)):
        assert max(answer["1f1b"][:2]) < EXACT, answer["1f1b"][:2]


def test_stages_are_cut_by_cost() -> None:
    """The head counts as much as several blocks, so the last stage has fewer of them."""
    assert cut(Costs(blocks=(1.0,) * 8, head=0.0), 4) == [range(2), range(2, 4), range(4, 6), range(6, 8)]
    assert cut(Costs(blocks=(1.0,) * 8, head=3.0), 2) == [range(5), range(5, 8)]
    assert cut(Costs(blocks=(5.0, 1.0, 1.0, 1.0, 1.0), head=0.0), 2) == [range(1), range(1, 5)]
    config = config_of(num_layers=3, windows=(None, 4), vocab_size=640)
    found = costs(config, 64)
    assert found.blocks[0] == found.blocks[2] > found.blocks[1]  # a window of 4 has fewer pairs
    head = 2 * config.hidden_size * config.vocab_size
    assert head < found.head < 1.01 * head  # and the last norm


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: cut(Costs(blocks=(1.0, 1.0), head=0.0), 3), "3 stages for 2 layers"),
        (lambda: check_micro_batches("1f1b", 2, 4), "2 micro-batches for a 1f1b pipeline of 4 ranks"),
        (lambda: check_micro_batches("interleaved", 5, 2), "5 micro-batches for an interleaved pipeline of 2 ranks"),
        (lambda: stages_of("zbv", 0, 2), "there is no pipeline schedule 'zbv'"),  # type: ignore[arg-type]
        (lambda: Stage(model_of(config_of(positions=T5Relative())), range(1)), "a model with T5 positions"),
        (lambda: Stage(model_of(config_of(dropout=0.1)), range(1)), "a pipeline of a model with dropout"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(BaguError, match=words):
        call()
