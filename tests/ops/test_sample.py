"""Sampling: the tokens of each filter by their probabilities, ties, rows without a finite logit, any batch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from bagu import ops
from bagu.errors import ArgumentError
from tests.ops.points import DEVICE, GPU

BACKENDS = ("torch", "triton")
V = 40
FILTERS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
}


def drawn(logits: torch.Tensor, u: torch.Tensor, backend: str | None = None, **given: Any) -> torch.Tensor:
    """Tokens for rows that share their parameters."""
    S, values = len(logits), {"temperature": 1.0, "top_k": logits.shape[1], "top_p": 1.0, "min_p": 0.0} | given
    lists = {name: values.pop(name).to(DEVICE) for name in ("ids", "values", "allowed") if name in values}
    dtypes = {"top_k": torch.int64}
    args = {k: torch.full((S,), v, dtype=dtypes.get(k, torch.float32), device=DEVICE) for k, v in values.items()}
    return ops.sample(logits.to(DEVICE), **args, u=u.to(DEVICE), **lists, backend=backend).cpu()


def row(seed: int = 0, size: int = V) -> torch.Tensor:
    return 2 * torch.randn(1, size, generator=torch.Generator().manual_seed(seed))


def probabilities(
    x: torch.Tensor, temperature: float = 1.0, top_k: int = V, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """The distribution of x[V] after the filters, token by token, in fp64."""
    p = (x.double() / temperature).softmax(-1)
    ranked = sorted((i for i in range(len(x)) if p[i] >= min_p * p.max()), key=lambda i: -p[i])[:top_k]
    total, height, kept = sum(p[i] for i in ranked), 0.0, []
    for i in ranked:
        if height >= top_p * total and top_p < 1.0:
            break
        kept.append(i)
        height += p[i]
    q = torch.zeros_like(p)
    q[kept] = p[kept]
    return q / q.sum()


@pytest.mark.parametrize("name", FILTERS)
def test_equally_spaced_random_numbers_give_each_token_its_share(name: str) -> None:
    """Of N numbers u, a token has N p of them, up to one at each end of its interval."""
    x, N = row(), 4000
    found = torch.bincount(drawn(x.expand(N, V), (torch.arange(N) + 0.5) / N, **FILTERS[name]), minlength=V)
    want = probabilities(x[0], **FILTERS[name])
    assert (found - N * want).abs().max() <= 1.01
    assert (found[want == 0] == 0).all()


@pytest.mark.parametrize("name", FILTERS)
def test_tokens_follow_the_distribution(name: str) -> None:
    """Chi-squared of 5000 draws over the n tokens with 5 or more expected ones: its mean is n, its variance 2 n."""
    x, N = row(1), 5000
    u = torch.from_numpy(np.random.default_rng(7).random(N, dtype=np.float32))
    found = torch.bincount(drawn(x.expand(N, V), u, **FILTERS[name]), minlength=V).double()
    want = N * probabilities(x[0], **FILTERS[name])
    often = want >= 5
    statistic, n = float(((found - want)[often] ** 2 / want[often]).sum()), int(often.sum())
    assert statistic < n + 5 * (2 * n) ** 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_as_large_as_the_last_kept_one_are_kept(backend: str) -> None:
    x = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log().half().expand(8, 4)
    u = (torch.arange(8) + 0.5) / 8
    assert set(drawn(x, u, backend, top_k=2).tolist()) == {0, 1, 2, 3}
    assert set(drawn(x, u, backend, top_p=0.39).tolist()) == {0}
    assert set(drawn(x, u, backend, top_p=0.41).tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("second", [1, 130])  # in the group of the first, or in the next one
def test_shares_and_counts_that_are_met_exactly(backend: str, second: int) -> None:
    """Two tokens of weight 1 and four of weight 1/2, in three groups: the first two have half of the mass."""
    x = torch.full((1, 300), -torch.inf)
    x[:, [0, second]], x[:, [10, 131, 260, 299]] = 0.0, torch.tensor(0.5).log()
    high, every = [0, second], [min(second, 10), 299]  # what u = 0.3 and u = 0.9 give if the first two are kept, or all
    above = float(torch.tensor(0.5).nextafter(torch.tensor(1.0)))
    rows = [  # top_k, top_p, min_p
        ((300, 0.5, 0.0), high), ((300, above, 0.0), every), ((300, 1.0, 0.5), every), ((300, 1.0, above), high),
        ((300, 1.0, 1.0), high), ((1, 1.0, 0.0), high), ((2, 1.0, 0.0), high), ((3, 1.0, 0.0), every),
        ((299, 1.0, 0.0), every), ((300, 1.0, 0.0), every), ((4, 0.66, 0.0), high), ((4, 0.67, 0.0), every),
    ]  # fmt: skip
    k, p, least = (torch.tensor(v, device=DEVICE).repeat_interleave(2) for v in zip(*(r for r, _ in rows), strict=True))
    u = torch.tensor([0.3, 0.9], device=DEVICE).repeat(len(rows))
    found = ops.sample(x.expand(len(u), -1).to(DEVICE), torch.ones_like(u), k, p, least, u, backend=backend)
    assert found.view(-1, 2).tolist() == [kept for _, kept in rows]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [{}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.3}])
def test_a_number_that_was_rounded_to_1_gives_the_last_kept_token(backend: str, given: dict[str, float]) -> None:
    x = torch.full((2, 300), -torch.inf if not given else -9.0)
    x[:, 3], x[:, 140] = 1.0, 0.5
    assert drawn(x, torch.tensor([1.0, 0.0]), backend, **given).tolist() == [140, 3]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("given", [{"top_p": 1e-30}, {"top_k": 1}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_extreme_settings_keep_the_largest_logit(given: dict[str, float], backend: str) -> None:
    x = torch.cat([row(), row(1)])
    x[:, 7] = 30.0
    assert drawn(x, torch.tensor([0.0, 1.0]), backend, **given).tolist() == [7, 7]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_of_equal_logits_is_greedy_also_if_it_was_replaced(backend: str, temperature: float) -> None:
    x = torch.full((3, 300), -torch.inf)
    x[:, 150] = 1.0
    ids, values = torch.tensor([[20, 200], [-1, -1], [160, -1]]), torch.tensor([[1.0, 1.0], [9.0, 9.0], [1.0, 9.0]])
    found = drawn(x, torch.zeros(3), backend, temperature=temperature, ids=ids, values=values).tolist()
    assert found == ([20, 150, 150] if temperature == 0 else [150, 150, 150])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_without_a_finite_largest_logit_gives_a_token(value: float, temperature: float, backend: str) -> None:
    """An id outside the vocabulary would end the engine at the next embedding."""
    x = torch.cat([torch.full((1, V), value), row(), row(1)])
    x[1, 3] = value
    u = torch.tensor([0.5, 1.0, 0.5])
    for given in ({}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.1}):
        found = drawn(x, u, backend, temperature=temperature, **given)
        assert ((found >= 0) & (found < V)).all()
        assert found[2] == drawn(x[2:], u[2:], backend, temperature=temperature, **given)[0]
        if value == float("inf"):
            assert found[1] == 3


def test_values_without_ids_are_refused() -> None:
    with pytest.raises(ArgumentError, match="values is given without ids"):
        drawn(row(), torch.zeros(1), values=torch.zeros(1, 3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FILTERS)
def test_a_mask_is_as_a_logit_of_minus_infinity(name: str, backend: str) -> None:
    N, size = 64 if GPU or backend == "torch" else 8, 333
    x, u = row(3, size).expand(N, size), (torch.arange(N) + 0.5) / N
    has_bit = torch.rand(N, size, generator=torch.Generator().manual_seed(1)) < 0.3
    packed = np.packbits(np.pad(has_bit.numpy(), ((0, 0), (0, 19 + 32))), axis=1, bitorder="little").view(np.int32)
    found = drawn(x, u, backend, **FILTERS[name], allowed=torch.from_numpy(packed))  # one word more than it needs
    assert found.tolist() == drawn(x.where(has_bit, -torch.inf), u, backend, **FILTERS[name]).tolist()


def test_a_mask_with_too_few_words_is_refused() -> None:
    with pytest.raises(ArgumentError, match="allowed has 1 words of 32 bits for 40 tokens"):
        drawn(row(), torch.zeros(1), allowed=torch.zeros(1, 1, dtype=torch.int32))


@pytest.mark.parametrize("given", [{}, {"top_k": 50, "top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.95}])
def test_backends_agree_and_a_row_is_the_same_alone(given: dict[str, float]) -> None:
    """500 logits through the interpreter, a vocabulary of 151,936 on a GPU."""
    S, size = (256, 151_936) if GPU else (2, 500)
    g = torch.Generator().manual_seed(0)
    x, u = (3 * torch.randn(S, size, generator=g)).half(), torch.rand(S, generator=g)
    fast, naive = drawn(x, u, "triton", **given), drawn(x, u, "torch", **given)
    assert (fast != naive).sum() <= S // 100  # u may fall within a rounding of the boundary of two tokens
    rows = range(0, S, max(S // 5, 1))
    assert [int(drawn(x[i : i + 1], u[i : i + 1], "triton", **given)) for i in rows] == [int(fast[i]) for i in rows]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_with_a_filter_leaves_the_next_row_alone(backend: str) -> None:
    """Its groups are fewer than the lanes that hold them (192 of 256): the lanes beyond belong to the next row."""
    S, size = 3, 20_000
    x, u = torch.cat([row(seed, size) for seed in range(S)]), torch.full((S,), 0.2)
    share = torch.tensor([0.95, 1.0, 0.95])
    found = ops.sample(
        x.to(DEVICE), *(t.to(DEVICE) for t in (torch.ones(S), torch.full((S,), size), share, torch.zeros(S), u)),
        backend=backend,
    )  # fmt: skip
    alone = [int(drawn(x[i : i + 1], u[i : i + 1], "torch", top_p=float(share[i]))) for i in range(S)]
    assert found.tolist() == alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_rows_than_a_grid_has_are_sampled_in_pieces(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    x, u = torch.cat([row(seed) for seed in range(8)]), torch.rand(8, generator=torch.Generator().manual_seed(1))
    ids, values = torch.arange(8).unsqueeze(1) % V, torch.full((8, 1), 9.0)
    whole = drawn(x, u, backend, top_k=5, ids=ids, values=values)
    monkeypatch.setattr(sys.modules["bagu.ops.sample"], "MOST_ROWS", 3)
    assert torch.equal(drawn(x, u, backend, top_k=5, ids=ids, values=values), whole)
    with pytest.raises(ArgumentError, match="u"):
        drawn(x, u[:5], backend)


@pytest.mark.skipif(not GPU, reason="a CUDA grid's second dim ends at 65,535")
def test_two_hundred_thousand_rows() -> None:
    assert drawn(row().expand(200_000, V), torch.zeros(200_000), temperature=0.0).eq(row().argmax()).all()
