"""Which sizes are warmed up, and that traffic afterwards finds them (on a GPU, test_engine_gpu.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.serve.config import EngineConfig
from bagu.serve.graphs import GraphInputs, padding, rehearsed_decodes
from bagu.serve.warm_up import Decodes, decode_sizes, prompt_sizes


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40_960), st.integers(1, 40_960))
def test_every_decode_step_has_its_graph_among_the_sizes(count: int, most: int, context: int, longest: int) -> None:
    count, context = min(count, most), min(context, longest)
    size = padding(count, count, 1).bucket(rehearsed_decodes(count, context, 1, 0, 16), longest)
    assert Decodes(size.sequences, size.context) in decode_sizes(most, longest)


@pytest.mark.parametrize("num_groups", [1, 2])
def test_a_rehearsed_step_stays_in_the_block_of_padding(num_groups: int) -> None:
    B, spare = 16, 9
    step = rehearsed_decodes(3, 300, num_groups, spare, B)
    more = padding(3, 3, 1)
    size = more.bucket(step, 4096)
    inputs = GraphInputs(size, B, 8, torch.device("cpu"), num_groups)
    inputs.fill(step, more, spare, B)
    batch = inputs.batch
    assert (size.sequences, size.context) == (4, 512) and batch.context_lens.tolist() == [1] * 4
    assert len(batch.slots) == len(batch.block_tables) == num_groups
    for slots, table in zip(batch.slots, batch.block_tables, strict=True):
        assert slots.tolist() == [spare * B] * 4 and table.shape == (4, 32) and bool((table == spare).all())


def test_usual_contexts_come_first_and_small_batches_before_large_ones() -> None:
    sizes = decode_sizes(64, 8192)
    assert sizes[:4] == [Decodes(1, 256), Decodes(2, 256), Decodes(4, 256), Decodes(8, 256)]
    assert {size.context for size in sizes[-7:]} == {8192} and len(sizes) == 7 * 6


def test_prompts_grow_to_the_largest_step() -> None:
    assert list(prompt_sizes(100)) == [16, 32, 64, 100]
    assert list(prompt_sizes(8)) == [8]


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="warm_up"):
        EngineConfig(warm_up=seconds)
