"""The choice of blocks against its definition at any sizes, with ties; and the same choice in any batch."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu import ops
from bagu.ops.choose_blocks.means import packed_means
from bagu.ops.choose_blocks.spec import Args, reference

plans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), min_size=1, max_size=4)


@settings(max_examples=60, derandomize=True)
@given(
    plan=plans,
    size=st.integers(1, 7),
    top=st.integers(0, 9),
    near=st.integers(0, 4),
    dense=st.integers(0, 4),
    pages=st.booleans(),
)
def test_any_sizes_and_ties(
    plan: list[tuple[int, int]], size: int, top: int, near: int, dense: int, pages: bool
) -> None:
    contexts = [past + new for past, new in plan]
    columns = max(1, *(-(-c // size) for c in contexts))
    random = torch.Generator().manual_seed(sum(contexts) + 31 * size + top)
    q = torch.randint(-2, 3, (sum(new for _, new in plan), 4, 3), generator=random).float()
    means = torch.randint(-1, 2, (len(plan) * columns, 2, 3), generator=random).float()  # few values: many ties
    tables = torch.randperm(len(means), generator=random).view(len(plan), columns).to(torch.int32)
    offsets = torch.tensor([0, *(new for _, new in plan)]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(contexts, dtype=torch.int32)
    longest = max(1, *contexts), max(new for _, new in plan)
    a = Args(q, means, tables, offsets, lengths, longest[1], longest[0], size, top, near, dense * size, pages)
    got = ops.choose_blocks(
        q, means, tables, offsets, lengths, longest[1], longest[0], size=size, top=top, near=near,
        dense_below=dense * size, pages=pages, backend="torch",
    )  # fmt: skip
    for mine, want in zip(got, reference(a), strict=True):
        assert torch.equal(mine.double(), want)


def test_a_token_chooses_the_same_in_a_text_and_alone() -> None:
    """Training has all tokens of a text, decode one: in invariant mode scores have the same bits."""
    random, size, T = torch.Generator().manual_seed(0), 4, 90
    q, k = torch.randn(T, 4, 16, generator=random), torch.randn(T, 2, 16, generator=random)
    cu = torch.tensor([0, T], dtype=torch.int32)
    means, tables = packed_means(k, cu, T, size)
    choice = {"size": size, "top": 3, "near": 1, "dense_below": 8}
    with ops.invariant():
        whole, lengths = ops.choose_blocks(q, means, tables, cu, cu.diff(), T, T, **choice)
        for t in (7, 8, 31, 32, 60, 89):
            one = torch.tensor([0, 1], dtype=torch.int32)
            alone, length = ops.choose_blocks(q[t : t + 1], means, tables, one, one[1:] * (t + 1), 1, T, **choice)
            assert torch.equal(alone[0], whole[t]) and torch.equal(length[0], lengths[t])


def test_attention_to_all_blocks_is_attention() -> None:
    random, size, lengths = torch.Generator().manual_seed(0), 4, (37, 0, 1, 22)
    T, cu = sum(lengths), torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    q, k, v = (torch.randn(T, n, 8, generator=random, dtype=torch.float64) for n in (4, 2, 2))
    means, tables = packed_means(k, cu, max(lengths), size)
    sizes = (cu, cu.diff(), max(lengths), max(lengths))
    blocks, _ = ops.choose_blocks(q, means, tables, *sizes, size=size, top=99, near=0, dense_below=0)
    out, lse = ops.block_attention(q, k, v, blocks, cu, max(lengths), size=size, near=0, dense_below=0)
    want, want_lse = ops.attention(q, k, v, cu, max(lengths))
    torch.testing.assert_close((out, lse), (want, want_lse))
