"""Pages of layers with a window: what a long text keeps in the pool, with the bits of dense masking."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from small_engine import small_engine, small_model

from bagu.nn import ModelConfig, Transformer
from bagu.nn.count import kv_bytes
from bagu.nn.init import init_weights
from bagu.serve.build import layer_groups
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.kv.groups import LayerGroup, max_positions, whole
from bagu.serve.kv.paged import PagedKV, block_bytes
from bagu.serve.kv.pool import size_pool
from bagu.serve.request import Request, Sampling

LONG = 32_768
# The layers and windows of the released configurations; one narrow head stands for their heads.
SHAPES: dict[str, dict[str, Any]] = {
    "Gemma 3 1B": {"num_layers": 26, "windows": (512,) * 5 + (None,)},
    "Gemma 3 4B": {"num_layers": 34, "windows": (1024,) * 5 + (None,)},
    "gpt-oss 20B": {"num_layers": 24, "windows": (128, None)},
}
SHARE = {"Gemma 3 1B": 0.2, "Gemma 3 4B": 0.2, "gpt-oss 20B": 0.55}


def shape(name: str, *, scale: int = 1) -> ModelConfig:
    """The layers of a model, with windows and length divided by `scale`."""
    given = SHAPES[name]
    windows = tuple(w and w // scale for w in given["windows"])
    return ModelConfig(
        vocab_size=64, hidden_size=16, num_heads=1, num_kv_heads=1, head_dim=8, intermediate_size=16,
        max_len=LONG // scale, num_layers=given["num_layers"], windows=windows,
    )  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_text_of_32k_tokens_keeps_a_fraction_of_the_keys_and_values(name: str) -> None:
    config = shape(name)
    groups = layer_groups(config)
    each = block_bytes(config, 16, torch.bfloat16, num_layers=max(len(g.layers) for g in groups))
    windowed = [g for g in groups if g.window is not None]
    assert all(g.max_blocks(LONG, 16) == -(-g.window // 16) + 1 for g in windowed if g.window)
    now = each * sum(g.max_blocks(LONG, 16) for g in groups)
    before = block_bytes(config, 16, torch.bfloat16) * LONG // 16
    assert now / before <= SHARE[name]
    assert now / LONG == pytest.approx(kv_bytes(config, context=LONG), rel=0.15)  # of the planner
    assert sorted(i for g in groups for i in g.layers) == list(range(config.num_layers))


@pytest.mark.parametrize("name", ["Gemma 3 1B", "gpt-oss 20B"])
@pytest.mark.parametrize("invariant", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_engine_keeps_that_and_computes_the_bits_of_dense_masking(name: str, invariant: bool) -> None:
    """1/32 of the length and of the windows, with blocks of 1/16: the shares are those of the full size."""
    config, settings = shape(name, scale=32), {"block_size": 1, "max_num_batched_tokens": 128, "max_num_seqs": 2}
    model = init_weights(Transformer(config), 0)
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(64, (config.max_len - 4,), generator=generator).tolist())
    engine = Engine(model, None, EngineConfig(num_blocks=4096, invariant=invariant, **settings))
    groups = engine.blocks.groups
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=2)
    engine.submit(Request(id="r", prompt=prompt, sampling=sampling))
    got, used = [], 0
    while engine.has_work:
        held = engine.blocks.used_count
        events = [e for e in engine.step() if e.token is not None]
        got += [(e.token, e.logprob, e.top) for e in events]
        used = held if events else used
    dense = block_bytes(config, 1, torch.float32) * (config.max_len - 1)
    kept = used * engine.runner.kv.num_bytes // engine.runner.kv.num_blocks
    assert len(groups) > 1 and kept / dense <= SHARE[name]
    plain = Engine(model, None, EngineConfig(num_blocks=4096, invariant=invariant, **settings))
    _use_one_group(plain)
    plain.submit(Request(id="r", prompt=prompt, sampling=sampling))
    want = []
    while plain.has_work:
        want += [(e.token, e.logprob, e.top) for e in plain.step() if e.token is not None]
    assert got == want and len(got) == 4, "the same bits"


def _use_one_group(engine: Engine) -> None:
    """Let an engine keep all positions of all layers, in one table."""
    from bagu.serve.kv.blocks import Blocks
    from bagu.serve.runner import Runner
    from bagu.serve.sampler import Sampler
    from bagu.serve.scheduler import Scheduler

    config, kv = engine.model.config, engine.runner.kv
    engine.blocks = Blocks(kv.num_blocks, kv.block_size, prefix_cache=True, groups=whole(config.num_layers))
    engine.scheduler = Scheduler(engine.scheduler.config, engine.blocks)
    engine.runner = Runner(
        engine.model, PagedKV(config, kv.num_blocks, kv.block_size), engine.config, engine.max_model_len
    )
    engine.sampler = Sampler(engine.runner, None, engine.config.seed, ())


def test_groups_of_a_model() -> None:
    config = small_model().config
    kinds = {
        (None,): [(None, (0, 1, 2))],
        (5,): [(5, (0, 1, 2))],
        (4, None): [(None, (1,)), (4, (0,)), (4, (2,))],
        (5, 9): [(5, (0,)), (5, (2,)), (9, (1,))],
    }
    for windows, expected in kinds.items():
        groups = layer_groups(dataclasses.replace(config, windows=windows))
        assert [(g.window, g.layers) for g in groups] == expected


def test_the_pool_is_sized_by_what_groups_keep() -> None:
    model = Transformer(shape("gpt-oss 20B", scale=32), device="meta")
    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, kv_memory=1 << 30)
    # 12 layers keep 1,024 tokens in 64 blocks, 12 keep 4 in 2; a step of 32 tokens needs 2 more of each group
    assert size_pool(model, config).num_blocks == 2 * (64 + 2) + 2 * 2
    groups = (LayerGroup((0,)), LayerGroup((1,), 4))
    assert max_positions(groups, 10, 4, 1000) == 32 and max_positions(groups, 3, 4, 1000) == 4
    assert max_positions((LayerGroup((0,), 4),), 2, 4, 1000) == 1000


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 26}, {"async_scheduling": True, "max_num_batched_tokens": 8}])
def test_choices_prefixes_and_preemption_with_windows_in_some_layers(settings: dict[str, Any]) -> None:
    model = small_model("windows in some")
    prompts = [[3 + i % 7 for i in range(30)], [3 + i % 7 for i in range(30)] + [5, 6], [9, 8, 7, 6, 5] * 4]
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, n=2)
    expected = [small_engine(model, num_blocks=256).generate([p], sampling)[0].tokens for p in prompts]
    engine = small_engine(model, **settings)
    assert [c.tokens for c in engine.generate(prompts, sampling)[::2]] == expected
    engine.scheduler.queues.check_integrity()
    assert engine.blocks.used_count == 0
