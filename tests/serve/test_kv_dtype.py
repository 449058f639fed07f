"""A KV cache of 8 bits: what it holds, its size, and that text does not depend on how the engine uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_engine import small_engine, small_model

from bagu import ops
from bagu.errors import ArgumentError, BackendError
from bagu.nn.kv import CacheError, DenseKV, HeadTransform
from bagu.nn.model import Transformer
from bagu.ops.kv_write.quantize import dequantize, quantize
from bagu.serve.config import EngineConfig
from bagu.serve.kv.paged import EIGHT_BITS, PagedKV, block_bytes
from bagu.serve.kv.pool import size_pool
from bagu.serve.request import Request, Sampling

PROMPTS = [[1, 2, 3], [5] * 20, [7, 8], list(range(9, 15)), list(range(1, 10))]
KINDS = ["gqa", "mqa, QK norm", "windows in all layers"]
NAMES = sorted(EIGHT_BITS)


class RoundedKV(DenseKV):
    """A dense cache whose new keys and values are rounded to 8 bits."""

    def __init__(self, dtype: torch.dtype, *args: Any) -> None:
        super().__init__(*args)
        self.eight_bits = dtype

    def write(self, layer: int, qkv: torch.Tensor, transform: HeadTransform) -> torch.Tensor:
        q = super().write(layer, qkv, transform)
        assert self.values is not None
        for cache in (self.keys[layer], self.values[layer]):
            cache[self.rows, self.positions] = dequantize(*quantize(cache[self.rows, self.positions], self.eight_bits))
        return q


def dense_logits(model: Transformer, kv: DenseKV, ids: list[int], new: int) -> torch.Tensor:
    """The logits after the last of `new` tokens, which follow the ones before them."""
    positions, cu_seqlens, longest = kv.plan([new])
    return model.logits(model(torch.tensor(ids[-new:]), positions, cu_seqlens, longest, kv).hidden[-1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_are_those_of_a_cache_with_rounded_keys_and_values(name: str, kind: str) -> None:
    model = small_model(kind)
    engine = small_engine(model, kv_dtype=name)
    assert engine.runner.kv.layers[0].keys.dtype == EIGHT_BITS[name]
    rounded, exact = RoundedKV(EIGHT_BITS[name], model.config, 1, 64), DenseKV(model.config, 1, 64)
    ids, new = list(range(20)), 20
    engine.submit(Request(id="r", prompt=tuple(ids), sampling=Sampling(max_tokens=5, temperature=0.0)))
    for _ in range(4):  # a prefill, then decodes
        plan = engine.scheduler.plan()
        assert plan is not None
        got = engine.runner.run(plan).logits
        want, without = dense_logits(model, rounded, ids, new), dense_logits(model, exact, ids, new)
        # the last bit of an fp32 number may round to another of 256 values: far less than all roundings together
        assert (got - want).norm() < 0.2 * (without - want).norm()
        ids.append(int(want.argmax()))
        new = 1
        engine.scheduler.commit(plan, [ids[-1]])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"prefix_cache": False}, marks=pytest.mark.slow),
        pytest.param({"block_size": 1}, marks=pytest.mark.slow),
        pytest.param({"num_blocks": 14}, marks=pytest.mark.slow),
        {"num_blocks": 11, "max_num_batched_tokens": 8},
        pytest.param({"async_scheduling": True, "max_num_batched_tokens": 8}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_pool_chunks_and_preemption_do_not_change_the_text(settings: dict[str, Any]) -> None:
    model, sampling = small_model(), Sampling(max_tokens=20, temperature=0.0, n=2)  # two choices share their blocks
    want = [c.tokens for c in small_engine(model, kv_dtype="int8").generate(PROMPTS, sampling)]
    engine = small_engine(model, kv_dtype="int8", **settings)
    for _ in range(2):  # the second time with a warm cache
        assert [c.tokens for c in engine.generate(PROMPTS, sampling)] == want
    assert engine.blocks.used_count == 0
    if settings.get("num_blocks") == 14:
        assert engine.stats().preemptions > 0, "the pool should be too small for this"


def test_scores_equal_those_of_the_sampled_text() -> None:
    engine, exact = small_engine(small_model(), kv_dtype="int8"), small_engine(small_model())
    found = engine.generate(PROMPTS, Sampling(max_tokens=8, temperature=0.0, logprobs=0))
    texts, starts = [[*p, *c.tokens] for p, c in zip(PROMPTS, found, strict=True)], [len(p) for p in PROMPTS]
    sampled = torch.tensor([logprob for c in found for logprob in c.logprobs or ()])
    scored, without = (torch.tensor([x for score in e.score(texts, starts) for x in score]) for e in (engine, exact))
    assert (scored - sampled).norm() < 0.2 * (without - sampled).norm()  # as above


@pytest.mark.parametrize("name", NAMES)
def test_the_pool_counts_keys_values_and_scales(name: str) -> None:
    config = small_model().config  # 3 layers of 2 key heads of 8 features
    kv = PagedKV(config, 5, 4, dtype=EIGHT_BITS[name])
    assert kv.num_bytes == 5 * block_bytes(config, 4, EIGHT_BITS[name]) == 5 * 3 * 4 * 2 * (2 * 8 + 2 * 4)
    model, memory = small_model(), 100 * block_bytes(config, 16, torch.float32)
    plain, eight = (size_pool(model, EngineConfig(kv_memory=memory, kv_dtype=d)).num_blocks for d in ("auto", name))
    assert (plain, eight) == (100, 100 * 64 // 24)


def test_copied_blocks_keep_their_scales() -> None:
    kv = PagedKV(small_model().config, 3, 2, dtype=torch.int8)
    for i, pool in enumerate(kv.tensors):
        pool[0] = i + 1
    kv.copy([(0, 2)])
    assert all((pool[2] == i + 1).all() for i, pool in enumerate(kv.tensors))


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="invariant cannot be combined with kv_dtype = int8"):
        EngineConfig(kv_dtype="int8", invariant=True)
    with pytest.raises(ArgumentError, match="kv_dtype = 'int4'"):
        EngineConfig(kv_dtype="int4")  # type: ignore[arg-type]
    with pytest.raises(CacheError, match="latent cache of an MLA model has no 8-bit form"):
        small_engine(small_model("mla"), kv_dtype="fp8")
    pool, steps = torch.zeros(2, 4, 1, 8, dtype=torch.int8), torch.zeros(2, 4, 1)
    ints = torch.tensor([0, 1], dtype=torch.int32)
    with ops.invariant(), pytest.raises(BackendError, match="8-bit cache has no invariant mode"):
        ops.paged_attention(
            torch.zeros(1, 1, 8), pool, pool, ints[None], ints, ints[1:], 1, 1, k_scale=steps, v_scale=steps
        )
    with pytest.raises(ArgumentError, match=r"v_cache is torch.int8 with no scales, and the tokens are torch.float32"):
        ops.paged_attention(torch.zeros(1, 1, 8), pool, pool, ints[None], ints, ints[1:], 1, 1, k_scale=steps)
