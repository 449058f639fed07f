"""A model that is divided for inference gives the hidden states and logits of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from shared_models import EXACT, batch_of, config_of, model_of, open_cpu
from test_tensor import MODELS

from bagu.errors import ArgumentError
from bagu.nn.model import Transformer
from bagu.parallel.inference import divide, gather_logits, local_heads
from bagu.parallel.tensor import check_sizes
from bagu.parallel.traffic import Tally
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.kv.paged import PagedKV
from bagu.serve.request import Sampling
from bagu.serve.runner import Runner
from tests.variants import some

SERVED = [name for name in MODELS if name not in ("bert", "linear attention")]


@torch.no_grad()
def difference(name: str) -> float:
    """The worst relative difference of the logits on this rank, for 7 tokens: no number of ranks divides them."""
    mesh = open_cpu(tp=dist.get_world_size())
    config = config_of(**MODELS[name])
    batch, _ = batch_of((4, 1, 2))
    whole, part = model_of(config), model_of(config)
    divide(part, mesh)
    wanted = whole.logits(whole(*batch).hidden)
    found = gather_logits(part.logits(part(*batch).hidden), config.vocab_size, mesh)
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", SERVED)
def test_logits_are_those_of_one_process(two: Ranks, name: str) -> None:
    assert max(two.run(difference, name)) < EXACT


def test_four_ranks(four: Ranks) -> None:
    assert max(four.run(difference, "llama")) < EXACT


def same_tokens(name: str) -> bool:
    """Whether an engine on the divided model generates the tokens of one process. Each rank plans and samples for
    itself: the logits are the same."""
    mesh = open_cpu(tp=dist.get_world_size())
    config = config_of(**MODELS[name])
    sampling = Sampling(max_tokens=12, temperature=0.0)
    prompts = [[1, 2, 3], [*range(20, 40)], [7]]
    part = model_of(config).float().eval()
    divide(part, mesh)
    tokens = []
    for divided in (False, True):
        engine = Engine(
            model_of(config).float(), None, EngineConfig(num_blocks=32, max_num_batched_tokens=8, max_num_seqs=4)
        )
        if divided:
            cache = engine.runner.kv
            kv = PagedKV(local_heads(config, mesh.size("tp")), 32, cache.block_size, groups=cache.groups)
            runner = Runner(part, kv, engine.config, engine.max_model_len, mesh)
            engine.runner = engine.sampler.runner = runner
        tokens.append([c.tokens for c in engine.generate(prompts, sampling)])
    return tokens[0] == tokens[1]


@pytest.mark.parametrize("name", some(SERVED, ("gqa, q-norm, window, tied", "mla", "moe", "t5")))
def test_engines_with_every_kind_of_cache_generate_the_same_tokens(two: Ranks, name: str) -> None:
    assert two.run(same_tokens, name) == [True, True]


@torch.no_grad()
def collectives() -> dict[Any, Tally]:
    mesh = open_cpu(tp=2)
    part = model_of(config_of())
    divide(part, mesh)
    mesh.traffic.tallies.clear()
    batch, _ = batch_of((7,))
    hidden = part(*batch).hidden
    gather_logits(part.logits(hidden[-1:]), 61, mesh)
    gather_logits(part.logits(hidden[:0]), 61, mesh)  # a step that samples nothing exchanges nothing
    return dict(mesh.traffic.tallies)


def test_a_layer_has_two_all_reduces(two: Ranks) -> None:
    config, T = config_of(), 7
    wanted = {"all_reduce": (2 * config.num_layers + 1, T * config.hidden_size * 8), "all_gather": (1, 2 * 31 * 8)}
    for found in two.run(collectives):
        assert {kind: (t.calls, t.size // t.calls) for (kind, _), t in found.items()} == wanted


def test_the_cache_of_a_rank_has_its_heads() -> None:
    config = local_heads(config_of(num_heads=8, num_kv_heads=4), 2)
    assert (config.num_heads, config.num_kv_heads) == (4, 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_heads": 4, "num_kv_heads": 1}, "tp=2 does not divide 1 KV heads"),
        ({"intermediate_size": 33}, "tp=2 does not divide 33 features of the feed-forward network"),
        ({"weight_norm": True}, "tensor parallelism with weight_norm"),
    ],
)
def test_a_model_that_cannot_be_divided_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        check_sizes(config_of(**changes), 2)


def test_dropout_is_no_obstacle_to_inference() -> None:
    check_sizes(Transformer(config_of(dropout=0.1), device="meta").config, 2)
