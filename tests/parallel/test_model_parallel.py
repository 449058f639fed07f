"""The trainer on meshes with tp, cp, pp and ep gives the losses, norms and weights of one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch
from ranks import Ranks
from test_equality import differences
from tiny import Alone, Case

from bagu.nn.choices import NormConfig
from bagu.nn.config import MoEConfig
from bagu.nn.position_choices import Alibi, Learned
from tests.variants import of_cases

GROUPS = {"num_heads": 4, "num_kv_heads": 2}
GPT = {
    "norm": NormConfig(kind="layer", bias=True), "positions": Learned(), "ffn": "gelu", "ffn_bias": True,
    "qkv_bias": True, "out_bias": True, "tie_embeddings": True, "num_heads": 2, "num_kv_heads": 2, "vocab_size": 65,
}  # fmt: skip
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_size=16, num_shared=1, aux_weight=0.01, bias_rate=0.01)
MOE = {**GROUPS, "moe": EXPERTS}
DEEP = {**GROUPS, "num_layers": 4}
MUON = {"kind": "muon", "newton_schulz_dtype": "fp64"}


def short(name: str, mesh: str, **options: Any) -> Case:
    """A combination of features whose parts are tested over 20 steps: two steps show a wrong sum or update too.

    Two micro-batches, or four where ranks divide them or a pipeline must be full."""
    divided = any(name in mesh for name in ("dp", "shard", "pp"))
    return Case(name=name, mesh=mesh, steps=2, micro_batches=4 if divided else 2, **{"model": GROUPS, **options})


RING, ULYSSES = {"context_parallel": "ring"}, {"context_parallel": "ulysses"}
BLOCK, SELECTIVE = {"activation_checkpointing": "block"}, {"activation_checkpointing": "selective"}


def schedule(name: str, **options: Any) -> dict[str, Any]:
    return {"pipeline": name, **options}


ONE = {"num_layers": 1}  # over 20 steps, where the mode allows it: the short cases have two layers or four
TWO = [
    Case(name="tp", mesh="tp=2", model={**GPT, **ONE}, micro_batches=2),
    Case(name="cp, ring", mesh="cp=2", model={**GROUPS, **ONE}, micro_batches=2),
    Case(
        name="cp, ulysses", mesh="cp=2", model={**GROUPS, **ONE, "positions": Alibi()}, options=ULYSSES, micro_batches=2
    ),
    Case(name="pp", mesh="pp=2", model=GPT, micro_batches=2),
    Case(name="ep", mesh="ep=2", model={**MOE, **ONE}, micro_batches=2),
    short("tp, lora", "tp=2", lora=True),
    short("tp, muon, experts, recomputed", "tp=2", optimizer=MUON, model=MOE, options=BLOCK),
    short("tp, selectively recomputed", "tp=2", options=SELECTIVE),
    short("cp, selectively recomputed", "cp=2", options=SELECTIVE),
    short("cp, lora, muon", "cp=2", lora=True, optimizer=MUON),
    short("gpipe", "pp=2", options=schedule("gpipe")),
    short("interleaved", "pp=2", model=DEEP, options=schedule("interleaved", stages_per_rank=2)),
    short("zero bubble", "pp=2", model={**GPT, "num_layers": 4}, options=schedule("zero_bubble")),
    short("pp, experts", "pp=2", model=MOE),
    short("pp, recomputed", "pp=2", options=BLOCK),
    short("pp, selectively recomputed", "pp=2", options=SELECTIVE),
    short("pp, lora, muon", "pp=2", lora=True, optimizer=MUON),
    short("ep, muon", "ep=2", model=MOE, optimizer=MUON),
    short("ep, selectively recomputed", "ep=2", model=MOE, options=SELECTIVE),
    short("ep, dropout", "ep=2", model={**MOE, "dropout": 0.1}),
    short("tp, lion, no clipping", "tp=2", optimizer={"kind": "lion"}, options={"clip": None}),
]
FOUR = [
    Case(name="tp x pp", mesh="tp=2,pp=2", model=GPT, micro_batches=2),
    short("tp x dp", "tp=2,dp=2"),
    short("tp x cp, ring", "tp=2,cp=2"),
    short("tp x cp, ulysses", "tp=2,cp=2", model={"num_heads": 4, "num_kv_heads": 4}, options=ULYSSES),
    short("tp x ep", "tp=2,ep=2", model=MOE),
    short("cp x pp, ring", "cp=2,pp=2"),
    short("cp x pp, ulysses", "cp=2,pp=2", model=DEEP, options={**ULYSSES, **schedule("interleaved")}),
    short("ep x pp", "ep=2,pp=2", model=MOE),
    short("dp x pp, zero bubble", "dp=2,pp=2", model=DEEP, options=schedule("zero_bubble")),
    short("dp x ep", "dp=2,ep=2", model=MOE),
    short("dp x cp", "dp=2,cp=2"),
    short("ep x cp", "ep=2,cp=2", model={**GROUPS, "moe": MoEConfig(num_experts=4, top_k=2, expert_size=16)}),
    short("tp x zero 2", "tp=2,shard=2", model=GPT, zero=2),
    short("pp x zero 1", "pp=2,shard=2", model=GPT, zero=1),
    short(
        "pp x zero 2, zero bubble",
        "pp=2,shard=2",
        model={**GPT, "num_layers": 4},
        zero=2,
        options=schedule("zero_bubble"),
    ),
    *(short(f"tp x zero {stage}, muon", "tp=2,shard=2", model=GPT, zero=stage, optimizer=MUON) for stage in (1, 3)),
    short("cp x zero 3", "cp=2,shard=2", zero=3),
    short("ep x zero 1", "ep=2,shard=2", model=MOE, zero=1),
    short("ep x zero 3, muon", "ep=2,shard=2", model=MOE, zero=3, optimizer=MUON),
]


QUICK = (
    "tp", "cp, ring", "cp, ulysses", "pp", "ep", "tp, muon, experts, recomputed", "interleaved", "zero bubble",
    "pp, lora, muon", "ep, dropout",
)  # fmt: skip


@pytest.mark.parametrize("case", of_cases(TWO, *QUICK))
def test_two_ranks_equal_one_in_fp64(case: Case, two: Ranks, alone: Alone) -> None:
    assert max(differences(case, two, alone)) < 1e-10


QUICK_OF_FOUR = (
    "tp x pp", "tp x cp, ring", "cp x pp, ulysses", "tp x ep", "dp x pp, zero bubble", "pp x zero 1",
    "tp x zero 3, muon", "cp x zero 3", "ep x zero 3, muon",
)  # fmt: skip


@pytest.mark.parametrize("case", of_cases(FOUR, *QUICK_OF_FOUR))
def test_four_ranks_equal_one_in_fp64(case: Case, four: Ranks, alone: Alone) -> None:
    assert max(differences(case, four, alone)) < 1e-10


def in_fp32(name: str, mesh: str, **options: Any) -> Case:
    """Six steps: the same cases run over 20 in fp64."""
    return Case(name=name, mesh=mesh, dtype=torch.float32, micro_batches=2, steps=6, **{"model": GROUPS, **options})


FP32 = [
    in_fp32("tp", "tp=2", model={**GROUPS, **ONE}),
    in_fp32("ring", "cp=2", model={**GROUPS, **ONE}),
    in_fp32("pp", "pp=2"),
    in_fp32("ep", "ep=2", model={**MOE, **ONE}),
]


@pytest.mark.parametrize("case", FP32, ids=lambda c: c.name)
def test_two_ranks_equal_one_in_fp32(case: Case, two: Ranks, alone: Alone) -> None:
    """Losses, norms and weights, with a rule that is smooth in the gradient: the first updates of AdamW are the signs
    of gradients, and a rounding can change the sign of one that is almost 0."""
    assert max(differences(replace(case, optimizer={"kind": "momentum", "lr": 0.05}), two, alone)) < 1e-5


def losses_differ(case: Case, ranks: Ranks, alone: Alone) -> float:
    """The largest relative difference of a loss."""
    steps, _ = alone.run(case)
    (found, _), *_ = ranks.run(tiny.run, case, alone=False)
    return max(abs(a - b) / a for (a, _), (b, _) in zip(steps, found, strict=True))


@pytest.mark.parametrize("case", [replace(FP32[0], steps=8)], ids=lambda c: c.name)
def test_losses_of_adamw_are_equal_in_fp32(case: Case, two: Ranks, alone: Alone) -> None:
    assert losses_differ(case, two, alone) < 1e-5


@pytest.mark.parametrize(
    "case",
    [
        short("tp", "tp=2"),
        short("cp", "cp=2"),
        short("zero bubble", "pp=2", model=DEEP, options=schedule("zero_bubble")),
        short("ep", "ep=2", model=MOE),
    ],
    ids=lambda c: c.name,
)
def test_bf16_parameters_have_fp32_masters_on_every_rank(case: Case, two: Ranks, alone: Alone) -> None:
    """The first losses are equal; later ones differ by roundings of bf16, of which a loss averages many."""
    assert losses_differ(replace(case, dtype=torch.bfloat16), two, alone) < 2**-8
