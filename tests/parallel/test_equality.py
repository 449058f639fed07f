"""Every mode gives the losses and the weights of the run in one process."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from ranks import Ranks
from tiny import Alone, Case

from bagu.nn.config import MoEConfig
from tests.variants import of_cases

MUON = {"kind": "muon", "newton_schulz_dtype": "fp64"}
MOE = {"moe": MoEConfig(num_experts=4, top_k=2, expert_size=16, aux_weight=0.01, bias_rate=0.01)}
KINDS = ("sgd", "momentum", "nesterov", "adagrad", "adadelta", "rmsprop", "adam", "lion")


def short(name: str, **options: Any) -> Case:
    """A combination of features whose parts are tested over 20 steps: four steps show a wrong sum too."""
    return Case(name=name, steps=4, **{"mesh": "shard=2", **options})


TWO = [
    # 20 steps with one micro-batch a rank; the short cases accumulate two
    Case(name="data parallel", micro_batches=2),
    Case(name="zero 1", mesh="shard=2", zero=1, micro_batches=2),
    Case(name="zero 2", mesh="shard=2", zero=2, micro_batches=2),
    Case(name="zero 3", mesh="shard=2", zero=3, micro_batches=2),
    *(short(f"zero {stage}, accumulated", zero=stage) for stage in (2, 3)),
    short("data parallel, accumulated", mesh="dp=2"),
    Case(name="muon, zero 3", mesh="shard=2", zero=3, optimizer=MUON, micro_batches=2),
    *(short(f"{kind}, zero 2", zero=2, micro_batches=2, optimizer={"kind": kind}) for kind in KINDS),
    short("muon, data parallel", mesh="dp=2", optimizer=MUON),
    short("muon, zero 1", zero=1, optimizer=MUON),
    short("dropout", zero=2, model={"dropout": 0.1}),
    short("experts", model=MOE),
    short("experts, data parallel", mesh="dp=2", model=MOE),
    short("recomputed", options={"activation_checkpointing": "block"}),
    short("selectively recomputed", options={"activation_checkpointing": "selective"}),
    short("untied head", model={"tie_embeddings": False}),
    short("lora", lora=True),
    short("lora, data parallel", mesh="dp=2", lora=True),
    *(short(f"offloaded, zero {stage}", zero=stage, options={"offload": True}) for stage in (1, 3)),
    short("offloaded muon", optimizer=MUON, options={"offload": True}),
    short("no clipping", options={"clip": None}),
    short("fp8, data parallel", mesh="dp=2", options={"precision": "fp8"}),
    short("fp8, zero 2", zero=2, options={"precision": "fp8"}),
]
FOUR = [
    Case(name="zero 3", mesh="shard=4", zero=3),
    short("data parallel", mesh="dp=4"),
    short("zero 1", mesh="shard=4", zero=1),
    short("zero 2", mesh="shard=4", zero=2),
    short("hybrid 1", mesh="dp=2,shard=2", zero=1, micro_batches=8),
    short("hybrid 2", mesh="dp=2,shard=2", zero=2, micro_batches=8),
    short("hybrid 3", mesh="dp=2,shard=2", zero=3, micro_batches=8),
    short("muon, hybrid", mesh="dp=2,shard=2", optimizer=MUON),
]
FP32 = [  # the same cases run over 20 steps in fp64
    Case(name="data parallel", dtype=torch.float32, micro_batches=2, steps=6),
    Case(name="zero 1", mesh="shard=2", zero=1, dtype=torch.float32, micro_batches=2, steps=6),
    Case(name="zero 2", mesh="shard=2", zero=2, dtype=torch.float32, micro_batches=2, steps=6),
    Case(name="zero 3", mesh="shard=2", zero=3, dtype=torch.float32, micro_batches=2, steps=6),
]


def differences(case: Case, ranks: Ranks, alone: Alone) -> tuple[float, float]:
    """The largest relative difference of a loss or norm, and the largest difference of a weight over its scale."""
    steps, weights = alone.run(case)
    worst = [0.0, 0.0]
    for losses, others in ranks.run(tiny.run, case, alone=False):
        assert weights.keys() == others.keys()
        for one, other in zip(steps, losses, strict=True):
            worst[0] = max(worst[0], *(abs(a - b) / abs(a) for a, b in zip(one, other, strict=True)))
        for name, w in weights.items():
            scale = w.abs().max().clamp(min=1e-3)
            worst[1] = max(worst[1], float((w.double() - others[name].double()).abs().max() / scale))
    return worst[0], worst[1]


QUICK = (
    "data parallel", "zero 1", "zero 3", "zero 3, accumulated", "muon, zero 3",
    "lion, zero 2", "dropout", "experts", "recomputed", "lora", "offloaded, zero 3", "fp8, zero 2",
)  # fmt: skip


@pytest.mark.parametrize("case", of_cases(TWO, *QUICK))
def test_two_ranks_equal_one_in_fp64(case: Case, two: Ranks, alone: Alone) -> None:
    assert max(differences(case, two, alone)) < 1e-10


@pytest.mark.parametrize("case", of_cases(FOUR, "zero 3", "hybrid 2", "hybrid 3", "muon, hybrid"))
def test_four_ranks_equal_one_in_fp64(case: Case, four: Ranks, alone: Alone) -> None:
    assert max(differences(case, four, alone)) < 1e-10


@pytest.mark.parametrize("case", FP32, ids=lambda c: c.name)
def test_two_ranks_equal_one_in_fp32(case: Case, two: Ranks, alone: Alone) -> None:
    assert max(differences(case, two, alone)) < 1e-5


@pytest.mark.parametrize("case", [short("bf16", dtype=torch.bfloat16), short("dp", mesh="dp=2", dtype=torch.bfloat16)])
def test_bf16_parameters_have_fp32_masters_on_every_rank(case: Case, two: Ranks, alone: Alone) -> None:
    """The first losses are equal; later ones differ by roundings of bf16, of which a loss averages many."""
    losses, _ = differences(case, two, alone)
    assert losses < 2**-8
