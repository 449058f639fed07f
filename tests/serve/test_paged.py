"""The KV pool: its size, copies of blocks, and the padding of CUDA graphs."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_engine import small_model

from bagu.errors import ArgumentError
from bagu.nn.config import MLAConfig, ModelConfig
from bagu.nn.kv import CacheError
from bagu.serve.config import EngineConfig
from bagu.serve.graphs import Bucket, GraphInputs, bucket, padding
from bagu.serve.inputs import StepInputs
from bagu.serve.kv.groups import LayerGroup
from bagu.serve.kv.paged import PagedKV, block_bytes
from bagu.serve.kv.pool import size_pool
from bagu.serve.plan import Plan
from bagu.serve.runner import Runner
from bagu.serve.ways import Forward


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


def decodes(ids: list[int], positions: list[int], rows: list[int], **more: list[int]) -> Plan:
    """A step with a token of each of these rows of the block tables."""
    lengths = [p + 1 for p in positions]
    return Plan(
        number=0, slices=[], copies=[], ids=ids, positions=positions, cu_seqlens=list(range(len(ids) + 1)),
        context_lens=lengths, table_rows=rows, table_writes=[], sampled=[],
        sample_rows=more.get("sample_rows", list(range(len(ids)))), next_drafts=[], late=[], num_decodes=len(ids),
        num_drafts=0, num_prompts=0, max_len=1, max_context=max(lengths),
    )  # fmt: skip


def test_padding_rows_of_a_graph_do_not_change_the_others() -> None:
    """The padding of graphs.py, run without a graph: the hidden states of the real rows do not change."""
    model = small_model()
    kv = PagedKV(model.config, 9, 4)  # block 8 is in no table
    for pool in kv.tensors:
        pool[:8].normal_(generator=torch.Generator().manual_seed(0))
        pool[8] = torch.nan  # must not be read
    steps = StepInputs(kv, torch.device("cpu"), 4, 16, adapters=False)
    forward = Forward(model, kv, steps)
    steps.tables[:] = [[0, 1, 0, 0], [2, 0, 0, 0], [3, 4, 5, 0], [7, 7, 7, 7]]
    plan = decodes([1, 2, 3], [5, 2, 8], [0, 1, 2])
    size = Bucket(sequences=4, tokens=4, max_len=1, context=16, adapters=False)
    new, used = (GraphInputs(size, 4, 4, torch.device("cpu")) for _ in range(2))
    used.fill(steps.arrays(decodes([9] * 4, [3] * 4, [3] * 4)), padding(4, 4, 1), 8, 4)  # a larger step before
    for inputs in (new, used):
        inputs.fill(steps.arrays(plan), padding(3, 3, 1), 8, 4)
    with torch.inference_mode():
        want = forward(steps.batch(plan)[0])
        for inputs in (new, used):
            torch.testing.assert_close(forward(inputs.batch)[:3], want)
            assert inputs.batch.slots[0].tolist() == [5, 10, 20, 32]
            assert inputs.batch.context_lens.tolist() == [
                6,
                3,
                9,
                1,
            ]
            assert inputs.batch.block_tables[0][3].tolist() == [8] * 4
    assert [bucket(n) for n in (1, 2, 3, 5, 32, 33, 65)] == [1, 2, 4, 8, 32, 64, 96]


def test_the_inputs_of_a_graph_are_aligned_views_of_one_buffer() -> None:
    """Choices of one prompt share its last row, so a step may have more samples than tokens."""
    model = small_model()
    groups = (LayerGroup((0, 1)), LayerGroup((2,), 4))
    kv = PagedKV(model.config, 3, 4, groups=groups)
    runner = Runner(model, kv, EngineConfig(max_num_seqs=5, cuda_graphs=False), 8)
    size = Bucket(sequences=1, tokens=1, max_len=1, context=8, adapters=True)
    inputs = GraphInputs(size, 4, 5, torch.device("cpu"), num_groups=2)
    step = runner.inputs.arrays(dataclasses.replace(decodes([6], [0], [2], sample_rows=[0] * 5), late=[(0, 3)]))
    inputs.fill(step._replace(adapters=np.array([1])), padding(1, 1, 1), 2, 4)
    late, adapters = inputs.late(1), inputs.batch.adapters
    assert adapters is not None and adapters.tolist() == [1]
    assert late.rows.tolist() == [0] and late.samples.tolist() == [3] and inputs.sample_rows(5).tolist() == [0] * 5
    batch = inputs.batch
    tensors = [t for t in (*batch, *batch.slots, *batch.block_tables, *late) if isinstance(t, torch.Tensor)]
    assert len(tensors) == 11
    for tensor in tensors:
        assert (tensor.data_ptr() - inputs.buffer.data_ptr()) % 16 == 0
        assert tensor.untyped_storage().data_ptr() == inputs.buffer.untyped_storage().data_ptr()


@pytest.mark.parametrize("block", [-1, 3])
def test_a_block_outside_the_pool_is_refused_in_a_table(block: int) -> None:
    """Kernels index the pool with the table without a check."""
    model = small_model()
    runner = Runner(model, PagedKV(model.config, 3, 4), EngineConfig(max_num_seqs=2), 8)
    plan = dataclasses.replace(decodes([5], [0], [0]), table_writes=[(0, 0, block)])
    with pytest.raises(CacheError, match=rf"names block {block}, and the pool has 0 to 2"):
        runner.run(plan)
    assert runner.run(dataclasses.replace(plan, table_writes=[(0, 0, 2)])).logits.shape == (1, 97)


@given(st.integers(1, 300))
def test_a_step_of_decodes_is_padded_with_decodes(count: int) -> None:
    more = padding(count, count, 1)
    assert count + more.tokens == count + len(more.ends) == bucket(count) and more.max_len == 1
    assert more.ends.tolist() == list(range(count + 1, bucket(count) + 1)) and (more.lengths == 1).all()


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
