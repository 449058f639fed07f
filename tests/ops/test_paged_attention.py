"""Paged attention and its cache: pages in any order against packed attention, and what a call may touch."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bagu import ops
from bagu.errors import ArgumentError, ConformanceError
from bagu.machine import native
from bagu.ops.attention.shape import Shape
from bagu.ops.call.dispatch import call
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, check
from bagu.ops.paged_attention import dense
from bagu.ops.paged_attention.pages import Pages

WRITE, PAGED = SPECS["kv_write"], SPECS["paged_attention"]


def pools(plan: list[tuple[int, int]], block: int, seed: int, *, heads: int = 2) -> dict[str, Any]:
    """Sequences of (past, new) written to shuffled blocks of NaN pools by `kv_write`; and their tokens, packed."""
    lengths = [past + new for past, new in plan]
    widths = [-(-n // block) for n in lengths]
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(widths) + 2, generator=random).tolist()
    tables = torch.full((len(plan), max(1, *widths)), -1, dtype=torch.int32)
    k, v = (torch.full((len(order), block, heads, 16), torch.nan) for _ in range(2))
    tokens = [torch.randn(sum(lengths), h, 16, generator=random) for h in (2 * heads, heads, heads)]
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for s, (begin, end) in enumerate(pairwise(ends)):
        tables[s, : widths[s]] = torch.tensor([order.pop() for _ in range(widths[s])], dtype=torch.int32)
        place = torch.arange(end - begin)
        slots = tables[s, place // block].long() * block + place % block
        ops.kv_write(k, tokens[1][begin:end], slots)
        ops.kv_write(v, tokens[2][begin:end], slots)
    new = torch.tensor(
        [past + begin + i for (past, n), begin in zip(plan, ends, strict=False) for i in range(n)]
    ).long()
    call = {
        "q": tokens[0][new], "k_cache": k, "v_cache": v, "block_tables": tables,
        "cu_seqlens": torch.tensor([0, *(n for _, n in plan)]).cumsum(0).to(torch.int32),
        "context_lens": torch.tensor(lengths, dtype=torch.int32),
        "max_len": max(n for _, n in plan), "max_context": max(1, *lengths),
    }  # fmt: skip
    return {"call": call, "tokens": tokens, "new": new, "ends": torch.tensor(ends, dtype=torch.int32)}


PLANS = st.lists(st.tuples(st.integers(0, 40), st.sampled_from((0, 1, 1, 1, 5, 17))), min_size=1, max_size=8)


@settings(max_examples=60)
@given(plan=PLANS, block=st.sampled_from((1, 3, 16)), window=st.sampled_from((None, 1, 9)), seed=st.integers(0, 9))
def test_pages_in_any_order_give_what_packed_attention_gives(
    plan: list[tuple[int, int]], block: int, window: int | None, seed: int
) -> None:
    made = pools(plan, block, seed)
    packed = ops.attention(*made["tokens"], made["ends"], max(1, *(a + b for a, b in plan)), window=window)
    for got, whole in zip(ops.paged_attention(**made["call"], window=window), packed, strict=True):
        torch.testing.assert_close(got, whole[made["new"]], rtol=1e-4, atol=1e-5)


@settings(max_examples=30)
@given(plan=PLANS, window=st.sampled_from((None, 9)), alibi=st.booleans())
def test_the_dense_path_gives_what_the_cpu_path_gives(
    plan: list[tuple[int, int]], window: int | None, alibi: bool
) -> None:
    made = pools(plan, 4, 0)["call"]
    assume(len(made["q"]))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]) if alibi else None
    pages = Pages(*(made[n] for n in ("k_cache", "v_cache", "block_tables", "context_lens", "max_context")))
    shape = Shape(causal=True, window=window, slopes=slopes)
    found = dense.forward(shape, 0.25, made["q"], pages, made["cu_seqlens"], made["max_len"])
    for got, want in zip(found, ops.paged_attention(**made, window=window, slopes=slopes), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_pending_negation_of_the_queries_is_carried_out() -> None:
    """Decodes read raw memory. In conformance the pools are negated too, and such pools are read another way."""
    made = pools([(7, 1)] * 5, 4, 0)["call"]
    want = ops.paged_attention(**made)
    got = ops.paged_attention(**made | {"q": torch._neg_view(-made["q"])})
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_write_moves_bits_and_touches_nothing_else(dtype: torch.dtype) -> None:
    cache = torch.full((4, 4, 2, 8), torch.nan, dtype=dtype)
    x, slots = torch.randn(3, 2, 8).to(dtype), torch.tensor([13, 0, 6])
    ops.kv_write(cache, x, slots)
    flat = cache.flatten(0, 1)
    assert torch.equal(flat[slots], x)
    assert flat.isnan().flatten(1).all(1).sum() == 13
    strided = torch.zeros(4, 2, 4, 8, dtype=dtype).transpose(1, 2)
    ops.kv_write(strided, x, slots)
    assert torch.equal(strided[slots // 4, slots % 4], x)


def test_conformance_sees_a_wrong_write_and_a_write_elsewhere() -> None:
    def late(**args: Any) -> tuple[()]:
        return call(WRITE, None, **args | {"slots": (args["slots"] + 1) % 16})

    def greedy(**args: Any) -> tuple[()]:
        call(WRITE, None, **args)
        args["x"].zero_()
        return ()

    with pytest.raises(ConformanceError, match="cache afterwards"):
        check(WRITE, WRITE.cases[0], torch.float32, late, backend="torch")
    with pytest.raises(ConformanceError, match="changed its input x"):
        check(WRITE, WRITE.cases[0], torch.float32, greedy, backend="torch")
    with pytest.raises(ConformanceError, match="changed its input cache"):
        blind = replace(WRITE, mutates=(), reference=lambda **_: ())
        check(blind, WRITE.cases[0], torch.float32, lambda **args: call(WRITE, None, **args), backend="torch")


def test_a_custom_op_says_what_it_mutates() -> None:
    schema = "(Tensor x, Tensor slots, Tensor(a!) cache, Tensor(b!)? scale) -> ()"
    assert WRITE.sig.schema(WRITE.sig.inputs, 0, WRITE.mutates) == schema


def test_plans_that_do_not_fit_are_refused() -> None:
    made = pools([(3, 1), (2, 5)], 4, 0)["call"]

    def refuse(said: str, **changed: Any) -> None:
        with pytest.raises(ArgumentError, match=said):
            ops.paged_attention(**made | changed)

    refuse("max_context is 13", max_context=13)
    refuse("max_context is 0", max_context=0)
    refuse("window is 0", window=0)
    refuse("4 offsets for 2 sequences", cu_seqlens=torch.tensor([0, 1, 6, 6], dtype=torch.int32))
    refuse("at most max_len = 2", max_len=2)
    refuse("heads", q=made["q"][:, :3])
    refuse("context_lens", context_lens=torch.tensor([4, 4], dtype=torch.int32))
    refuse("cu_seqlens is", cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32))
    refuse("expected an odd number", bias=torch.zeros(4, 4))


@pytest.mark.parametrize("plan", ([(9, 1)] * 5, [(9, 1), (3, 6), (0, 7)], [(30, 1)]), ids=("decode", "mixed", "one"))
def test_values_that_are_a_view_of_the_keys_are_read_with_them(plan: list[tuple[int, int]]) -> None:
    """MLA's latent: the same numbers as with values of their own."""
    made = pools(plan, 4, 0, heads=1)["call"]
    made["q"] = made["q"].repeat(1, 4, 1)  # many query heads to one key head
    view = made["k_cache"][..., :12]
    found, want = (ops.paged_attention(**made | {"v_cache": v}) for v in (view, view.clone()))
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected)
        assert got.isfinite().all()


@pytest.mark.parametrize("case", [c for c in PAGED.cases if not c.bench and "decode" in c.name], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_conform_without_a_compiler(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one, the conformance test runs them on decode.cpp."""
    monkeypatch.setenv("BAGU_NATIVE", "0")
    native.library.cache_clear()
    try:
        check(PAGED, case, dtype, lambda **args: call(PAGED, None, **args), backend="torch")
    finally:
        native.library.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
def test_a_split_decode_has_the_same_bits_in_a_cuda_graph() -> None:
    """The join of key ranges is a dependent launch, and reads nothing before the ranges are complete."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 256, 16, 2, 64, device="cuda", dtype=torch.bfloat16).unbind(0)
    made = {
        "q": torch.randn(2, 8, 64, device="cuda", dtype=torch.bfloat16), "k_cache": k, "v_cache": v,
        "block_tables": torch.randperm(256, device="cuda", dtype=torch.int32).view(2, 128),
        "cu_seqlens": torch.arange(3, device="cuda", dtype=torch.int32),
        "context_lens": torch.tensor([2048, 1999], device="cuda", dtype=torch.int32), "max_len": 1, "max_context": 2048,
    }  # fmt: skip
    for _ in range(3):  # compiled, then recorded, then replayed
        ops.paged_attention(**made, backend="triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.paged_attention(**made, backend="triton")
    for _ in range(20):
        made["q"].normal_()
        graph.replay()
        for x, y in zip(found, ops.paged_attention(**made, backend="triton"), strict=True):
            assert torch.equal(x, y)
    for x, y in zip(found, ops.paged_attention(**made, backend="torch"), strict=True):
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=torch.finfo(torch.bfloat16).eps)
