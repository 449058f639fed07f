"""Tensor parallelism gives the losses, gradients and weights of one process."""

from __future__ import annotations

import functools
from dataclasses import astuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from shared_models import (
    EXACT,
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
from torch.utils.checkpoint import checkpoint

from bagu.errors import ArgumentError
from bagu.nn.choices import MLAConfig, MoEConfig, NormConfig
from bagu.nn.lora import add_lora
from bagu.nn.position_choices import Alibi, Learned, Sinusoidal, T5Relative
from bagu.ops.catalogue import SPECS
from bagu.parallel.sharding import TENSOR, Split, gather_full, placements
from bagu.parallel.tensor import check_tensor_parallel, sum_replicated, tensor_parallel
from bagu.parallel.traffic import Tally
from bagu.parallel.vocab_loss import vocab_cross_entropy
from tests.variants import some

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gqa, q-norm, window, tied": {"num_heads": 8, "qk_norm": True, "windows": (None, 5), "tie_embeddings": True},
    "gpt2": {
        "norm": NormConfig(kind="layer", bias=True), "positions": Learned(), "ffn": "gelu", "ffn_bias": True,
        "qkv_bias": True, "out_bias": True,
    },
    "bert": {
        "norm": NormConfig(kind="layer", bias=True, placement="post"), "positions": Learned(), "ffn": "gelu",
        "ffn_bias": True, "qkv_bias": True, "out_bias": True, "causal": False, "embedding_norm": True,
        "num_token_types": 2, "mlm_head": True, "tie_embeddings": True,
    },
    "alibi": {"positions": Alibi()},
    "t5": {"positions": T5Relative(), "norm": NormConfig(placement="sandwich")},
    "linear attention": {"attention": "linear", "positions": Sinusoidal()},
    "mla": {"mla": MLAConfig(kv_rank=12, nope_dim=6, rope_dim=4, v_dim=8, q_rank=10), "head_dim": 10},
    "moe": {"moe": MoEConfig(num_experts=4, top_k=2, expert_size=8, num_shared=1, aux_weight=0.1)},
    "no norm": {"norm": NormConfig(placement="none", alpha=0.3)},
}  # fmt: skip


def tp_step(model: Any, places: Any, mesh: Any, batch: Any, targets: torch.Tensor, total: int) -> float:
    """One forward and backward of the divided model; the gradients are left in the parameters."""
    values = functools.partial(vocab_cross_entropy, vocab_size=model.config.vocab_size, mesh=mesh)
    out = model(*batch)
    loss = loss_of(out.hidden, model.head_weight, targets, total, values)
    loss = loss if out.aux_loss is None else loss + out.aux_loss
    loss.backward()
    sum_replicated({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, places, mesh)
    return float(loss.detach())


def compare(name: str, tp: int) -> dict[str, float]:
    """The worst differences of loss and gradients on this rank."""
    mesh = open_cpu(tp=tp, dp=dist.get_world_size() // tp)
    config = config_of(**MODELS[name])
    batch, targets = batch_of((9, 1, 6, 8))
    wanted_loss, wanted = one_process(model_of(config), [(batch, targets)])
    model = model_of(config)
    places = tensor_parallel(model, mesh)
    loss = tp_step(model, places, mesh, batch, targets, number_of_targets([targets]))
    return {
        "loss": abs(loss - wanted_loss),
        "gradient": worst(gather_full(gradients(model), places, mesh.group("tp")), wanted),
    }


@pytest.mark.parametrize("name", some(list(MODELS), ("gqa, q-norm, window, tied", "gpt2", "mla", "moe")))
def test_loss_and_gradients_are_those_of_one_process(four: Ranks, name: str) -> None:
    for tp in (2, 4):
        for rank, found in enumerate(four.run(compare, name, tp)):
            assert max(found.values()) < EXACT, (tp, rank, found)


def adapted(_: str) -> float:
    """LoRA on every linear: the pairs are divided with their weights."""
    mesh = open_cpu(tp=2)
    config, (batch, targets) = config_of(**MODELS["gpt2"]), batch_of((9, 1, 6, 8))
    alone, divided = model_of(config), model_of(config)
    for model in (alone, divided):
        add_lora(model, rank=2, alpha=4.0)
        with torch.no_grad():
            for number, p in enumerate(p for n, p in model.named_parameters() if n.endswith("lora_b")):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number), dtype=p.dtype))
    _, wanted = one_process(alone, [(batch, targets)])
    places = tensor_parallel(divided, mesh)
    tp_step(divided, places, mesh, batch, targets, number_of_targets([targets]))
    return worst(gather_full(gradients(divided), places, mesh.group("tp")), wanted)


def scored(_: str) -> float:
    """A reward model: the score head is on every rank, and its gradient is not summed."""
    mesh = open_cpu(tp=2)
    (batch, _targets), alone, divided = batch_of((9, 1, 6, 8)), *(model_of(config_of(score_head=True)) for _ in "ab")
    places = tensor_parallel(divided, mesh)
    for model in (alone, divided):
        model.score(model(*batch).hidden).square().mean().backward()
    grads = gradients(divided)
    sum_replicated(grads, places, mesh)
    return worst(gather_full(grads, places, mesh.group("tp")), gradients(alone))


@pytest.mark.parametrize("case", [adapted, scored])
def test_other_heads_and_adapters_have_the_gradients_of_one_process(two: Ranks, case: Any) -> None:
    assert max(two.run(case, "")) < EXACT


@pytest.mark.parametrize("name", MODELS)
def test_a_state_dict_is_cut_and_joined_again(name: str) -> None:
    state = dict(model_of(config_of(**MODELS[name])).named_parameters())
    places = placements(list(state), TENSOR, config_of(**MODELS[name]))
    parts = [{n: places[n].cut(x, rank, 4) for n, x in state.items()} for rank in range(4)]
    joined = {n: places[n].join([part[n] for part in parts]) for n in state}
    assert joined.keys() == state.keys() and all(torch.equal(joined[n], state[n]) for n in state)
    divided = [n for n in state if isinstance(places[n], Split)]
    assert all(sum(p[n].numel() for p in parts) == state[n].numel() for n in divided)
    linear = [n for n, p in state.items() if p.ndim > 1 and "router" not in n and "_a." not in n]
    kept = {"positions.weight", "token_types.weight", "mlm.dense.weight"}
    assert set(linear) - set(divided) <= kept


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({"num_kv_heads": 2}, 4, "tp=4 does not divide 2 KV heads"),
        ({"intermediate_size": 30}, 4, "tp=4 does not divide 30 features of the feed-forward network"),
        ({"vocab_size": 3}, 4, "tp=4 with a vocabulary of 3"),
        ({"dropout": 0.1}, 2, "tensor parallelism with dropout"),
        ({"weight_norm": True}, 2, "tensor parallelism with weight_norm"),
        ({"norm": NormConfig(kind="batch")}, 2, "tensor parallelism with batch norm"),
    ],
)
def test_what_cannot_be_divided_is_refused(changes: dict[str, Any], tp: int, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        check_tensor_parallel(config_of(**changes), tp)


def test_divided_dimensions_are_independent_in_the_specs() -> None:
    """Heads inside attention, tokens outside of it: no op needs the part of another rank."""
    assert {"H", "G"} <= set(SPECS["attention"].independent)
    for name in ("rms_norm", "layer_norm", "scale_norm", "add_rms_norm", "swiglu", "linear_cross_entropy"):
        assert "M" in SPECS[name].independent, name


def collectives_of(num_layers: int) -> tuple[dict[Any, Tally], dict[Any, Tally]]:
    """What a forward exchanged, and what forward and backward did."""
    mesh, config, (batch, targets) = open_cpu(tp=2), config_of(num_layers=num_layers), batch_of((9, 1, 6, 8))
    model = model_of(config)
    tensor_parallel(model, mesh)
    values = functools.partial(vocab_cross_entropy, vocab_size=config.vocab_size, mesh=mesh)
    loss = loss_of(model(*batch).hidden, model.head_weight, targets, 1, values)
    forward = dict(mesh.traffic.tallies)
    loss.backward()
    return forward, mesh.traffic.tallies


def test_a_layer_has_four_collectives_in_each_direction(two: Ranks) -> None:
    """Two all-gathers and two reduce-scatters of [T, D]: in bytes, the four all-reduces of a layer without sequence
    parallelism, 8 T D (t - 1) / t numbers."""
    one, three = (two.run(collectives_of, n)[0] for n in (1, 3))
    tensor = 24 * 24 * 8  # T D in fp64
    for direction, (less, more) in enumerate(zip(one, three, strict=True), start=1):
        for kind in ("all_gather", "reduce_scatter"):
            layer = [(b - a) / 2 for a, b in zip(astuple(less[kind, "tp"]), astuple(more[kind, "tp"]), strict=True)]
            assert layer == [2 * direction, 2 * direction * tensor, direction * tensor], kind
    # Besides the layers: the embedding's sum, the gathered hidden states, and two all-reduces of [T] for the loss.
    forward, both = one
    assert {kind: tally.calls for (kind, _), tally in forward.items()} == {
        "reduce_scatter": 3, "all_gather": 3, "all_reduce": 2,
    }  # fmt: skip
    assert both["all_reduce", "tp"] == forward["all_reduce", "tp"]  # the loss has no collective in the backward
    assert forward["all_reduce", "tp"].size == 24 * 8 + 2 * 24 * 8


def recomputed() -> float:
    """Blocks that are recomputed in the backward exchange their tokens again."""
    mesh, (packed, targets) = open_cpu(tp=2), batch_of((9, 1, 6, 8))
    alone, divided = (model_of(config_of()) for _ in "ab")
    places = tensor_parallel(divided, mesh)
    for block in divided.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    _, wanted = one_process(alone, [(packed, targets)])
    tp_step(divided, places, mesh, packed, targets, number_of_targets([targets]))
    return worst(gather_full(gradients(divided), places, mesh.group("tp")), wanted)


def test_recomputed_blocks_have_the_gradients_of_one_process(two: Ranks) -> None:
    assert max(two.run(recomputed)) < EXACT


def test_tokens_that_tp_does_not_divide_are_refused(two: Ranks) -> None:
    with pytest.raises(AssertionError, match="tp=2 does not divide a batch of 5 tokens"):
        two.run(odd_tokens)


def odd_tokens() -> None:
    mesh, model = open_cpu(tp=2), model_of(config_of())
    tensor_parallel(model, mesh)
    model(*batch_of((5,))[0])
