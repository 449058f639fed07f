"""Which sizes are warmed up, and that traffic afterwards finds them (on a GPU, test_engine_gpu.py)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.serve.config import EngineConfig
from bagu.serve.graphs import padding
from bagu.serve.inputs import StepArrays
from bagu.serve.warm_up import Decodes, decode_sizes, prompt_sizes


def decodes(count: int, context: int) -> StepArrays:
    zeros = np.zeros(count, dtype=np.int64)
    return StepArrays(
        ids=zeros, positions=zeros, slots=zeros, adapters=None, cu_seqlens=np.arange(count + 1, dtype=np.int32),
        context_lens=np.ones(count, dtype=np.int32), tables=np.zeros((1, 1), dtype=np.int32), table_rows=zeros,
        late=np.empty((0, 2), dtype=np.int64), sample_rows=None, max_len=1, max_context=context,
    )  # fmt: skip


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 40_960), st.integers(1, 40_960))
def test_every_decode_step_has_its_graph_among_the_sizes(count: int, most: int, context: int, longest: int) -> None:
    count, context = min(count, most), min(context, longest)
    size = padding(count, count, 1).bucket(decodes(count, context), longest)
    assert Decodes(size.sequences, size.context) in decode_sizes(most, longest)


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
