"""The KV pool: its size, copies of blocks, and the padding of CUDA graphs."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_engine import small_model

from bagu.errors import ArgumentError
from bagu.nn.config import MLAConfig, ModelConfig
from bagu.nn.kv import CacheError
from bagu.serve.config import EngineConfig
from bagu.serve.graphs import bucket, copy_padded, pad, padding
from bagu.serve.kv.paged import Batch, PagedKV, block_bytes
from bagu.serve.kv.pool import size_pool
from bagu.serve.plan import Plan
from bagu.serve.runner import Runner


@pytest.mark.parametrize(("kind", "floats"), [("gqa", 2 * 2 * 8), ("mla", 8 + 4)])
def test_block_bytes_equal_the_size_of_the_tensors(kind: str, floats: int) -> None:
    config = small_model(kind).config
    kv = PagedKV(config, 5, 4, dtype=torch.bfloat16)
    assert kv.num_bytes == 5 * block_bytes(config, 4, torch.bfloat16) == 5 * 3 * 4 * floats * 2


def test_deepseeks_cache_holds_latents_not_heads() -> None:
    """512 + 64 numbers per token and layer, where 128 expanded heads would have 128 * (192 + 128)."""
    mla = MLAConfig(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128)
    v3 = ModelConfig(
        vocab_size=129280, hidden_size=7168, num_layers=61, num_heads=128, num_kv_heads=128, head_dim=192, mla=mla,
        intermediate_size=18432, max_len=4096,
    )  # fmt: skip
    assert block_bytes(v3, 16, torch.bfloat16) == 16 * 61 * (512 + 64) * 2


def test_blocks_are_copied_in_all_layers_and_in_order() -> None:
    kv = PagedKV(small_model().config, 3, 2)
    for layer, pool in enumerate(kv.tensors):
        pool[0] = layer + 1.0
    kv.copy([(0, 1), (1, 2)])
    for layer, pool in enumerate(kv.tensors):
        assert (pool == layer + 1.0).all()


def test_the_pool_fits_the_memory_and_has_no_unusable_blocks() -> None:
    model = small_model()
    each = block_bytes(model.config, 16, torch.float32)
    assert size_pool(model, EngineConfig(kv_memory=10 * each)) == (10, 128, 16)
    assert size_pool(model, EngineConfig(kv_memory=5 * each)) == (5, 80, 16)  # no sequence longer than the pool
    assert size_pool(model, EngineConfig(kv_memory=1 << 40, max_num_seqs=3)) == (3 * 8, 128, 16)
    assert size_pool(model, EngineConfig(num_blocks=7, max_model_len=100)) == (7, 100, 16)
    with pytest.raises(ArgumentError, match="no block"):
        size_pool(model, EngineConfig(kv_memory=each - 1))
    with pytest.raises(ArgumentError, match="positions for 128"):
        size_pool(model, EngineConfig(max_model_len=129))


def test_a_bidirectional_model_has_no_cache() -> None:
    with pytest.raises(CacheError, match="bidirectional"):
        PagedKV(dataclasses.replace(small_model().config, causal=False), 3, 2)


def test_invalid_settings_are_refused() -> None:
    for wrong in ({"block_size": 0}, {"max_num_batched_tokens": 8}, {"gpu_memory_utilization": 1.5}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            EngineConfig(**wrong)
    with pytest.raises(ArgumentError, match="invariant"):
        EngineConfig(quantization="int8", invariant=True)


def test_padding_rows_of_a_graph_do_not_change_the_others() -> None:
    """The padding of graphs.py, run without a graph: the hidden states of the real rows do not change."""
    model = small_model()
    kv = PagedKV(model.config, 9, 4)  # block 8 is spare
    for pool in kv.tensors:
        pool[:8].normal_(generator=torch.Generator().manual_seed(0))
        pool[8] = torch.nan  # must not be read
    batch = Batch(
        ids=torch.tensor([1, 2, 3]), positions=torch.tensor([5, 2, 8]), slots=torch.tensor([5, 10, 20]),
        cu_seqlens=torch.arange(4, dtype=torch.int32), context_lens=torch.tensor([6, 3, 9], dtype=torch.int32),
        block_tables=torch.tensor([[0, 1, 0], [2, 0, 0], [3, 4, 5]], dtype=torch.int32), max_len=1, max_context=9,
        num_decodes=3, decode_context=9,
    )  # fmt: skip
    hidden = []
    padded = pad(batch, bucket(3), bucket(9, coarse=True), 4, 8)
    full = [torch.cat((t, t[:1])) for t in (batch.ids, batch.positions, batch.slots, batch.context_lens)]
    reused = pad(
        batch._replace(ids=full[0], positions=full[1], slots=full[2], context_lens=full[3],
                       block_tables=torch.tensor([[7, 7, 7, 7]] * 4, dtype=torch.int32)),
        bucket(3), bucket(9, coarse=True), 4, 8,
    )  # fmt: skip
    copy_padded(reused, batch, 4, 8)  # after a larger batch
    for b in (batch, padded, reused):
        kv.load(b)
        with torch.inference_mode():
            hidden.append(model(b.ids, b.positions, b.cu_seqlens, 1, kv).hidden[:3])
    for found in hidden[1:]:
        torch.testing.assert_close(found, hidden[0])
    for name in ("ids", "positions", "slots", "context_lens"):
        assert torch.equal(getattr(reused, name), getattr(padded, name)), name
    assert [bucket(n) for n in (1, 2, 3, 5, 32, 33, 65)] == [1, 2, 4, 8, 32, 64, 96]


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_outside_the_pool_is_refused_in_a_table(block: int) -> None:
    """Kernels index the pool with the table without a check."""
    model = small_model()
    runner = Runner(model, PagedKV(model.config, 3, 4), EngineConfig(max_num_seqs=2), 8)
    plan = Plan(
        number=0, slices=[], copies=[], ids=[5], positions=[0], cu_seqlens=[0, 1], context_lens=[1], table_rows=[0],
        table_writes=[(0, 0, block)], sampled=[], sample_rows=[0],
        next_drafts=[], late=[], num_decodes=1, num_drafts=0, num_prompts=0, max_len=1, max_context=1,
    )  # fmt: skip
    with pytest.raises(CacheError, match=rf"names block {block}, and the pool has 0 to 2"):
        runner.run(plan)
    assert runner.run(dataclasses.replace(plan, table_writes=[(0, 0, 2)])).logits.shape == (1, 97)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=70).filter(lambda lengths: max(lengths) > 1))
def test_the_padding_of_a_step_fills_its_bucket(lengths: list[int]) -> None:
    tokens, sequences, longest = sum(lengths), len(lengths), max(lengths)
    more = padding(tokens, sequences, longest)
    ends = [tokens, *more.ends.tolist()]
    assert ends[-1] == tokens + more.tokens == max(bucket(tokens, coarse=True), 8)
    assert more.lengths.tolist() == [b - a for a, b in itertools.pairwise(ends)]
    assert max(*more.lengths, longest) <= more.max_len and min(more.lengths) >= 0
    for other in range(tokens // 2 + 1, tokens + 1):  # its bucket alone decides how many sequences there are
        if bucket(other, coarse=True) == bucket(tokens, coarse=True):
            assert len(padding(other, sequences, longest).ends) == len(more.ends)
