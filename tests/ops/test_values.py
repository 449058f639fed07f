"""Values out of range: where they are read anyway, where the host builds them, and in debug mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagu import ops
from bagu.errors import ArgumentError


def segments() -> tuple[Any, ...]:
    """Two segments of 1 and 7 tokens with max_len = 4: as many tokens as two of 4 have."""
    q = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0))
    return q, q, q, torch.tensor([0, 1, 8], dtype=torch.int32), 4


def test_a_segment_longer_than_max_len_is_refused_where_the_sizes_fit() -> None:
    with pytest.raises(ArgumentError, match=r"cu_seqlens is \[0, 1, 8\].*max_len = 4"):
        ops.attention(*segments())


# a cache of its own begins with 30 s of compiling C++ headers
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_compiled_graph_refuses_it_too(backend: str) -> None:
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="longer than max_len"):
        torch.compile(lambda *a: ops.attention(*a)[0], fullgraph=True, backend=backend)(*segments())


X, TABLES = torch.linspace(-1, 1, 48).view(3, 2, 8), ops.rope_tables(5, 4)


def turned(positions: torch.Tensor) -> torch.Tensor:
    return ops.rope(X, *TABLES, positions)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("position", [-1, 5])
def test_a_position_outside_the_tables_is_refused_eagerly_and_compiled(position: int, backend: str) -> None:
    good, bad = torch.tensor([0, 4, 2]), torch.tensor([0, position, 2])
    with pytest.raises(ArgumentError, match="rope: positions holds"):
        turned(bad)
    torch._dynamo.reset()
    fn = torch.compile(turned, fullgraph=True, backend=backend)
    torch.testing.assert_close(fn(good), turned(good))
    with pytest.raises(RuntimeError, match="positions are not all in the tables"):
        fn(bad)


def pages(entry: int, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """One query over six tokens in blocks of 2, of which the table's first entry is given."""
    pool = torch.randn(4, 2, 1, 4, generator=torch.Generator().manual_seed(0))
    integers = lambda *v: torch.tensor(v, dtype=torch.int32)  # noqa: E731
    return ops.paged_attention(
        pool[:1, 0], pool, pool, integers(entry, 1, 2)[None], integers(0, 1), integers(6), 1, 6, window=window
    )


@pytest.mark.parametrize("entry", [-1, 4])
def test_a_block_table_entry_outside_the_pool_is_refused_in_debug_mode(entry: int, debug: None) -> None:
    with pytest.raises(ArgumentError, match=rf"block_tables\[0\] holds .*{entry}.*the pool has 0 to 3"):
        pages(entry)
    pages(3)
    pages(entry, window=3)  # an entry that no query sees may be anything


def test_slots_and_positions_are_checked_in_debug_mode(debug: None) -> None:
    with pytest.raises(ArgumentError, match="slots holds 8 to 8, and the cache has 0 to 7"):
        ops.kv_write(torch.zeros(2, 4, 1, 3), torch.ones(1, 1, 3), torch.tensor([8]))
    with pytest.raises(ArgumentError, match="rope_kv_write: slots holds -1 to -1, and the cache has 0 to 7"):
        ops.rope_kv_write(torch.ones(1, 1, 3, 4), torch.tensor([-1]), *torch.zeros(2, 2, 4, 1, 4))
    with pytest.raises(ArgumentError, match="rope: positions holds"):
        turned(torch.tensor([0, 1, 9]))
    q, k, v, _, max_len = segments()
    with pytest.raises(ArgumentError, match="cu_seqlens"):
        ops.attention(q, k, v, torch.tensor([0, 1, 9], dtype=torch.int32), max_len)
