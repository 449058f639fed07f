"""Expert parallelism gives the loss and gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from shared_models import EXACT, SMALL, batch_of, config_of, model_of, number_of_targets, one_process, open_cpu, worst

from bagu.errors import ArgumentError
from bagu.nn.choices import MoEConfig
from bagu.nn.moe import Router
from bagu.parallel.expert import check_expert_parallel, expert_parallel
from bagu.parallel.sharding import EXPERTS, Replicated, gather_full, placements

MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"moe": MoEConfig(num_experts=8, top_k=2, expert_size=8, num_shared=1, aux_weight=0.1)},
    "sigmoid, gelu": {
        "moe": MoEConfig(
            num_experts=4, top_k=3, expert_size=8, scoring="sigmoid", bias_rate=0.1, normalize_top_k=True,
            dense_layers=(0,),
        ),
        "ffn": "gelu",
    },
}  # fmt: skip
LENGTHS = ((9, 1, 6), (16,), (7, 9), (3, 5, 8))


def compare(name: str, ep: int, *, crowded: bool = False) -> tuple[float, float, int]:
    """A micro-batch per rank; the step is that of one process with all micro-batches."""
    mesh = open_cpu(ep=ep, dp=dist.get_world_size() // ep)
    config, batches = config_of(**MODELS[name]), [batch_of(n, i) for i, n in enumerate(LENGTHS)]
    alone, model = model_of(config), model_of(config)
    if crowded:  # equal scores: every token chooses the first experts, and some ranks get no row
        for layer in (m for each in (alone, model) for m in each.modules() if isinstance(m, Router)):
            torch.nn.init.zeros_(layer.weight)
    wanted_loss, wanted = one_process(alone, batches)
    places = expert_parallel(model, mesh)
    total = number_of_targets(t for _, t in batches)
    loss, grads = one_process(model, [batches[dist.get_rank()]], total, micro_batches=len(batches))
    sent = mesh.traffic.sent
    whole = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(whole)
    for parameter, g in grads.items():
        group = mesh.group("data" if isinstance(places[parameter], Replicated) else "dp")
        if group is not None:
            dist.all_reduce(g, group=group)
    return abs(float(whole) - wanted_loss), worst(gather_full(grads, places, mesh.group("ep")), wanted), sent


@pytest.mark.parametrize(("name", "crowded"), [("softmax", False), ("softmax", True), ("sigmoid, gelu", False)])
def test_loss_and_gradients_are_those_of_one_process(four: Ranks, name: str, crowded: bool) -> None:
    for ep in (2, 4):
        found = four.run(compare, name, ep, crowded=crowded)
        assert all(max(loss, gradient) < EXACT for loss, gradient, _ in found), (ep, found)
        moe = MODELS[name]["moe"]
        layers, tokens = 2 - len(moe.dense_layers), sum(map(sum, LENGTHS))
        rows = 4 * tokens * moe.top_k * SMALL["hidden_size"] * 8  # there and back, in the forward and in the backward
        counts = 4 * moe.num_experts * 8  # of each rank
        formula = (
            layers * (rows + counts) * (ep - 1) // ep
        )  # equally many rows for each rank; counted are the real ones
        assert sum(sent for _, _, sent in found) == pytest.approx(formula, rel=0.25)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({}, "ep=3 with a model that has no experts"), (MODELS["softmax"], "ep=3 does not divide 8 experts")],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_expert_parallel(config_of(**changes), 3)


def test_experts_are_cut_and_joined_again() -> None:
    config = config_of(**MODELS["softmax"])
    state = dict(model_of(config).named_parameters())
    places = placements(list(state), EXPERTS, config)
    parts = [{n: places[n].cut(x, rank, 4) for n, x in state.items()} for rank in range(4)]
    assert parts[0]["blocks.0.ffn.down"].shape[0] == 2 and len(parts[0]["blocks.0.ffn.shared.down.weight"]) == 24
    joined = {n: places[n].join([part[n] for part in parts]) for n in state}
    assert all(torch.equal(joined[n], state[n]) for n in state)
