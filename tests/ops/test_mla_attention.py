"""MLA attention: against paged attention and packed attention, what it refuses, and how it divides the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bagu import ops
from bagu.errors import ArgumentError

RANK, D, B = 12, 16, 4


def sequence(length: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A sequence whose rows are written to shuffled blocks of a pool of NaN; and its rows and queries in order."""
    random = torch.Generator().manual_seed(0)
    rows, q = (torch.randn(length, *more, D, generator=random).to(dtype) for more in ((), (6,)))
    count = -(-length // B)
    table = torch.randperm(count + 2, generator=random)[:count].to(torch.int32)
    cache, place = torch.full((count + 2, B, D), torch.nan, dtype=dtype), torch.arange(length)
    cache[table[place // B].long(), place % B] = rows
    return {"rows": rows, "q": q, "cache": cache, "table": table}


def call(made: dict[str, Any], begin: int, end: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens begin … end of the sequence, after its first `begin` ones."""
    cu, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, end - begin], [end]))
    plan = {"rank": RANK, "max_len": end - begin, "max_context": end, "cu_seqlens": cu, "context_lens": lengths}
    return ops.mla_attention(**{"q": made["q"][begin:end], "cache": made["cache"], "block_tables": made["table"][None]}
                             | plan | more)  # fmt: skip


def packed(made: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, length = made["rows"].unsqueeze(1), len(made["rows"])
    cu = torch.tensor([0, length], dtype=torch.int32)
    return ops.attention(made["q"], keys, keys[..., :RANK], cu, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_invariant_chunks_have_the_bits_of_packed_attention(chunk: int, dtype: torch.dtype) -> None:
    made = sequence(30, dtype)
    with ops.invariant():
        parts = [call(made, a, min(a + chunk, 30)) for a in range(0, 30, chunk)]
        for want, got in zip(packed(made), zip(*parts, strict=True), strict=True):
            assert torch.equal(want, torch.cat(got))


def test_wrong_plans_and_ranks_are_refused() -> None:
    made = sequence(10)
    for wrong, said in (
        ({"rank": 0}, "rank is 0, and a row of the cache has 16 features"),
        ({"rank": D + 1}, "rank is 17"),
        ({"window": 0}, "mla_attention: window is 0"),
        ({"max_context": 99}, "mla_attention: max_context is 99"),
        ({"max_len": 1}, "mla_attention: cu_seqlens has 2 offsets for 1 sequences of at most max_len = 1"),
        ({"cache": made["cache"][..., :-1]}, "cache has shape"),
    ):
        with pytest.raises(ArgumentError, match=said):
            call(made, 5, 10, **wrong)


def test_offsets_past_the_tokens_are_refused_by_the_op_that_was_called() -> None:
    offsets = {"cu_seqlens": torch.tensor([0, 6], dtype=torch.int32), "max_len": 6}
    with pytest.raises(ArgumentError, match=r"^mla_attention: cu_seqlens is \[0, 6\]"):
        call(sequence(10), 5, 10, **offsets)
    with ops.invariant(), pytest.raises(ArgumentError, match=r"^mla_attention: cu_seqlens is \[0, 6\]"):
        call(sequence(10), 5, 10, **offsets)


@pytest.mark.parametrize("entry", [-1, 5])
def test_a_block_outside_the_pool_is_refused_in_debug_mode(entry: int, debug: None) -> None:
    made = sequence(10)
    made["table"][0] = entry
    with pytest.raises(ArgumentError, match=rf"mla_attention: block_tables\[0\] holds .*{entry}.*the pool has 0 to 4"):
        call(made, 9, 10)
    call(made, 9, 10, window=3)  # no query attends to the block


def test_keys_are_split_where_that_fills_the_gpu() -> None:
    pytest.importorskip("triton")
    from bagu.ops.mla_attention.triton_backend import _split

    assert _split(128, 4096, 132) == 0, "64 sequences of two tiles: a wave that is almost full"
    assert _split(8, 32768, 132) == 2048, "4 sequences: 128 programs"
    assert _split(2, 200, 132) == 0, "a range has at least 256 keys"
    assert 0 < _split(160, 4096, 132) < 4096, (
        "80 sequences: a second wave of 28 programs would take as long as the first"
    )
