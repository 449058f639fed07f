"""Invariant mode: every op of it against its fp64 reference, and bit for bit against itself in other company.

Bits are compared with torch.equal: a row alone and at every place of a batch, tokens in one piece and in chunks, packed
segments and pages in any order. Fast mode fails these tests, which is checked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagu import ops
from bagu.errors import BackendError
from bagu.ops.call.dispatch import call
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, OpSpec, check
from bagu.ops.invariant.mode import ROW_BY_ROW, active
from tests.ops.block_sparse import check_company
from tests.ops.points import eight_bits

OWN = [s for s in SPECS.values() if hasattr(s.torch_backend, "invariant_forward")]
DTYPES = (torch.float32, torch.bfloat16)
POINTS = [
    pytest.param(s, c, d, id=f"{s.name}-{c}-{str(d)[6:]}")
    for s in OWN
    for c in s.cases
    if not c.bench and not eight_bits(s, c)
    for d in DTYPES
]


@pytest.fixture(params=(1, 3), ids=("one_thread", "three_threads"))
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One, and several: numbers from 1 to 4 are drawn below."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("spec, case, dtype", POINTS)
def test_conformance(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    def inside(**args: Any) -> Any:
        with ops.invariant():
            return call(spec, None, **args)  # its gradients are asked for outside

    # A GEMM of 16 rows has one chain of sums over K, of 4 rows several: 2.3 ulps at matmul's `offset`, at 16 rows of it
    # in fast mode too.
    check(replace(spec, ulps=max(4, spec.ulps)), case, dtype, inside, backend="torch")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gain(x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    return randn(x.shape[-1], dtype=x.dtype, seed=seed)


# A function of rows x[M, N], N a multiple of 8, for each op that maps rows to rows by itself.
ROWS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_rms_norm": lambda x, at: ops.add_rms_norm(x, x.flip(-1), gain(x)),
    "cross_entropy": lambda x, at: ops.cross_entropy(x, at % x.shape[1], label_smoothing=0.1),
    "dequantize_int8": lambda x, at: ops.dequantize_int8((40 * x).char(), x[:, 0].float(), dtype=x.dtype),
    "geglu": lambda x, at: ops.geglu(x),
    "geglu, exact": lambda x, at: ops.geglu(x, approximate="none"),
    "geglu, two tensors": lambda x, at: ops.geglu(x, x.flip(-1)),
    "gelu": lambda x, at: ops.gelu(x),
    "gelu, tanh": lambda x, at: ops.gelu(x, approximate=True),
    "kv_write": lambda x, at: _written(x, at),
    "layer_norm": lambda x, at: ops.layer_norm(x, gain(x), gain(x, 2)),
    "relu_squared": lambda x, at: ops.relu_squared(x),
    "rms_norm": lambda x, at: ops.rms_norm(x, gain(x)),
    "rope": lambda x, at: _rotated(x, at),
    "rope_kv_write": lambda x, at: _prepared(x, at),
    "sample": lambda x, at: _sampled(x, at, 0.9),
    "sample, all tokens": lambda x, at: _sampled(x, at, 1.0),
    "scale_norm": lambda x, at: ops.scale_norm(x, torch.tensor([1.5])),
    "softmax": lambda x, at: ops.softmax(x, 0.3),
    "swiglu": lambda x, at: ops.swiglu(x),
    "swiglu, two tensors": lambda x, at: ops.swiglu(x, x.flip(-1)),
    "transpose": lambda x, at: ops.transpose(x, 0, 1).T,
}


def _sampled(x: torch.Tensor, at: torch.Tensor, top_p: float) -> torch.Tensor:
    one = torch.ones(len(x))
    u = (at * 0.618034).frac().float()
    return ops.sample(x, 0.7 + 0.1 * (at % 3).float(), torch.full((len(x),), 40), top_p * one, 0.01 * one, u)


def _written(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache = x.new_zeros(40, 16, 2, x.shape[1] // 2)
    ops.kv_write(cache, x.reshape(-1, 2, x.shape[1] // 2), at)
    return cache.flatten(0, 1)[at].flatten(1)


def _prepared(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Queries, and the keys and values that are in the cache afterwards."""
    D = x.shape[1] // 4
    caches = [x.new_zeros(40, 16, 1, D) for _ in range(2)]
    cos, sin = (table[at] for table in ops.rope_tables(600, D // 2))
    w = gain(x[:, :D])
    q = ops.rope_kv_write(x.reshape(-1, 1, 4, D), at, *caches, cos=cos, sin=sin, q_weight=w, k_weight=w.flip(0))
    return torch.cat((q.flatten(1), *(cache.flatten(0, 1)[at].flatten(1) for cache in caches)), 1)


def _rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    N = x.shape[1]
    return ops.rope(x.unflatten(1, (4, N // 4)), *ops.rope_tables(600, N // 8), at).flatten(1)


def outputs(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def parts(M: int) -> Iterator[tuple[int, int]]:
    """Spans of M rows, alone and of several sizes, that begin at every place of a block of 16."""
    for size in (1, 3, 7, 16, 64, 129):
        for begin in range(0, M - size + 1, 3 if size == 1 else 5):
            yield begin, begin + size


def test_every_row_by_row_op_is_tried_here() -> None:
    # these and the two heads are tried below; mla_attention is paged_attention there
    blockwise = {"attention", "paged_attention", "mla_attention", "matmul", "grouped_matmul"}
    blockwise |= {"choose_blocks", "block_attention"}
    heads = {"linear_cross_entropy", "linear_cross_entropy_loss"}
    assert {name.split(",")[0] for name in ROWS} == ROW_BY_ROW | {s.name for s in OWN} - blockwise - heads


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(ROWS))
def test_rows_of_a_batch_are_those_rows_alone(name: str, dtype: torch.dtype) -> None:
    x, at = randn(130, 96, dtype=dtype), torch.arange(130)
    with ops.invariant():
        whole = outputs(ROWS[name](x, at))
        for a, b in parts(130):
            for y, z in zip(whole, outputs(ROWS[name](x[a:b], at[a:b])), strict=True):
                assert torch.equal(y[a:b], z), f"rows {a} to {b}"


# PyTorch gives threads a part each of 32768 elements and more: 401 rows of 352 are four parts, none of whole rows.
@settings(max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    T=st.one_of(st.integers(1, 20), st.sampled_from([130, 351, 401, 513])),
    N=st.sampled_from([8, 40, 72, 96, 352, 360]),
    threads=st.integers(1, 4),
    dtype=st.sampled_from(DTYPES),
    strided=st.booleans(),
)
def test_rows_have_their_bits_whatever_the_sizes_threads_and_strides(
    T: int, N: int, threads: int, dtype: torch.dtype, strided: bool
) -> None:
    x, at, before = randn(T, 2 * N, dtype=dtype, seed=T)[:, :N], torch.arange(T), torch.get_num_threads()
    x = x if strided else x.contiguous()
    try:
        with ops.invariant():
            for name, f in ROWS.items():
                torch.set_num_threads(threads)
                whole = outputs(f(x, at))
                torch.set_num_threads(1)
                for t in {*range(0, T, -(-T // 9)), T // 2, T // 3, T // 4, T - 1}:  # where the parts meet as well
                    for y, z in zip(whole, outputs(f(x[t : t + 1].clone(), at[t : t + 1])), strict=True):
                        assert torch.equal(y[t : t + 1], z), f"{name}: row {t}"
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_word_of_a_large_vocabulary_alone() -> None:
    """From 32768 numbers on PyTorch splits the sum of a lone row among its threads."""
    hidden, head, targets = randn(9, 16), randn(40_000, 16, seed=1), torch.arange(9)
    logits = hidden @ head.T
    with ops.invariant():
        losses = ops.cross_entropy(logits, targets)
        scores = ops.linear_cross_entropy(hidden, head, targets)
        for t in range(9):
            own = slice(t, t + 1)
            assert torch.equal(ops.cross_entropy(logits[own], targets[own]), losses[own])
            assert torch.equal(ops.cross_entropy(logits[t], targets[t]), losses[t])
            for y, z in zip(ops.linear_cross_entropy(hidden[own], head, targets[own]), scores, strict=True):
                assert torch.equal(y, z[own])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K, N", [(256, 768), (704, 256), (37, 23), (4864, 32)])
def test_products_of_any_number_of_rows(K: int, N: int, dtype: torch.dtype) -> None:
    x, w, bias = randn(130, K, dtype=dtype), randn(N, K, dtype=dtype, seed=1), randn(N, dtype=dtype, seed=2)
    with ops.invariant():
        whole = ops.matmul(x, w, bias)
        for M in range(1, 131, 1 if K < 1000 else 9):
            assert torch.equal(ops.matmul(x[:M], w, bias), whole[:M]), M
        for m in range(130):
            assert torch.equal(ops.matmul(x[m], w, bias), whole[m]), m


@pytest.mark.usefixtures("threads")
def test_an_experts_rows_do_not_see_how_many_they_are() -> None:
    x, w = randn(60, 48), randn(3, 40, 48, seed=1)
    with ops.invariant():
        whole = ops.grouped_matmul(x, w, torch.tensor([21, 21, 60], dtype=torch.int32))
        for m, e in ((0, 0), (20, 0), (21, 2), (59, 2)):
            ends = (torch.arange(3) >= e).to(torch.int32)
            assert torch.equal(ops.grouped_matmul(x[m : m + 1], w, ends)[0], whole[m])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_logprobs_of_any_number_of_tokens(dtype: torch.dtype) -> None:
    hidden, head = randn(130, 64, dtype=dtype), randn(999, 64, dtype=dtype, seed=1)
    targets = torch.arange(130) * 7
    with ops.invariant():
        whole = ops.linear_cross_entropy(hidden, head, targets)
        for memory in (None, 999 * 4 * 5):  # and however many are done at once
            for a, b in parts(130):
                for y, z in zip(
                    whole, ops.linear_cross_entropy(hidden[a:b], head, targets[a:b], -100, memory), strict=True
                ):
                    assert torch.equal(y[a:b], z), (a, b)
        weights = torch.ones(130)
        _, *trained = ops.linear_cross_entropy_loss(hidden.requires_grad_(), head, targets, weights)[:3]
        for y, z in zip(whole, trained, strict=True):
            assert torch.equal(y, z)


class Paged:
    """Two pools whose blocks are handed out in no order, filled and attended to as an engine does."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, block: int) -> None:
        self.k, self.v, self.B = k, v, block
        count = -(-k.shape[0] // block)
        self.table = torch.randperm(count + 3, generator=torch.Generator().manual_seed(5))[:count].to(torch.int32)
        self.pools = [torch.full((count + 3, block, *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (k, v)]

    def attend(self, q: torch.Tensor, begin: int, end: int, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens begin … end, whose keys and values are written first."""
        place = torch.arange(begin, end)
        slots = self.table[place // self.B].long() * self.B + place % self.B
        for pool, x in zip(self.pools, (self.k, self.v), strict=True):
            ops.kv_write(pool, x[begin:end], slots)
        cu, lengths = (torch.tensor(n, dtype=torch.int32) for n in ([0, end - begin], [end]))
        return ops.paged_attention(q[begin:end], *self.pools, self.table[None], cu, lengths, end - begin, end, **more)


LOOKS: list[dict[str, Any]] = [{}, {"window": 37}, {"slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
                               {"bias": randn(4, 19, seed=9)}]  # fmt: skip


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("look", LOOKS, ids=["plain", "window", "alibi", "bias"])
def test_packed_attention_is_paged_attention_in_any_chunks(look: dict[str, Any], dtype: torch.dtype) -> None:
    T, begin, end = 200, 41, 178  # one of three packed segments: two tiles of 64 keys, and 9
    length = end - begin
    q, k, v = (randn(T, h, 32, dtype=dtype, seed=s) for s, h in ((0, 4), (1, 2), (2, 2)))
    cu = torch.tensor([0, begin, end, T], dtype=torch.int32)
    with ops.invariant():
        trained = [x[begin:end] for x in ops.attention(q, k, v, cu, length, **look)]
        alone = ops.attention(
            q[begin:end], k[begin:end], v[begin:end], cu[:2] * 0 + torch.tensor([0, length]).int(), length, **look
        )
        for chunk, block in ((1, 16), (7, 16), (64, 16), (length, 5)):
            pages = Paged(k[begin:end], v[begin:end], block)
            pieces = [pages.attend(q[begin:end], a, min(a + chunk, length), **look) for a in range(0, length, chunk)]
            for want, same, got in zip(trained, alone, zip(*pieces, strict=True), strict=True):
                assert torch.equal(want, same)
                assert torch.equal(want, torch.cat(got)), f"chunks of {chunk}"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_is_the_same_at_every_place_of_a_batch(dtype: torch.dtype) -> None:
    N, B, S = 40, 8, 9
    k, v, q = (randn(*shape, dtype=dtype, seed=s) for s, shape in enumerate([(N, B, 2, 16)] * 2 + [(S, 4, 16)]))
    tables = torch.arange(N - 4, dtype=torch.int32).view(S, 4)
    lengths = torch.tensor([1, 8, 9, 15, 16, 17, 30, 31, 32], dtype=torch.int32)
    run = lambda who: ops.paged_attention(  # noqa: E731
        q[who],
        k,
        v,
        tables[who],
        torch.arange(len(who) + 1, dtype=torch.int32),
        lengths[who],
        1,
        int(lengths[who].max()),
    )
    with ops.invariant():
        alone = [run([s]) for s in range(S)]
        for turn in range(S):
            order = [(s + turn) % S for s in range(S)]
            for got, want in zip(run(order), zip(*alone, strict=True), strict=True):
                assert torch.equal(got, torch.cat([want[s] for s in order]))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sparse_attention_of_a_text_in_any_company(dtype: torch.dtype) -> None:
    lengths = (37, 290, 1, 22)
    q, k, v = (randn(sum(lengths), h, 32, dtype=dtype, seed=s) for s, h in ((0, 4), (1, 2), (2, 2)))
    with ops.invariant():
        check_company(q, k, v, lengths)


def test_fast_mode_does_not_keep_the_promise() -> None:
    """Or the tests above would prove nothing: there is a difference for the mode to remove."""
    x, w = randn(130, 256), randn(768, 256, seed=1)
    assert any(not torch.equal(ops.matmul(x[:M], w), ops.matmul(x, w)[:M]) for M in (1, 2, 3, 5))


def test_the_mode_is_scoped_and_its_backward_may_run_outside() -> None:
    x = randn(5, 8).requires_grad_()
    with ops.invariant():
        with ops.invariant():
            assert active()
        assert active()
        y = ops.matmul(x, randn(4, 8, seed=1))
    assert not active()
    y.sum().backward()
    torch.testing.assert_close(x.grad, randn(4, 8, seed=1).sum(0).expand(5, 8))


def test_what_cannot_keep_the_promise_is_refused() -> None:
    x, w = randn(4, 8), randn(8, seed=1)
    with ops.invariant():
        with pytest.raises(BackendError, match="batch_norm has no invariant form"):
            ops.batch_norm(x, w, w)
        with pytest.raises(BackendError, match="torch on meta was asked for"):
            ops.rms_norm(x.to("meta"), w.to("meta"))
        torch._dynamo.reset()
        with pytest.raises(Exception, match="asked for inside"):
            torch.compile(lambda: ops.rms_norm(x, w), fullgraph=True, backend="eager")()
