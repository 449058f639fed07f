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

from bagu import ops
from bagu.errors import BackendError
from bagu.ops.catalogue import SPECS
from bagu.ops.core import Case, OpSpec, check
from bagu.ops.dispatch import call
from bagu.ops.invariant import ROW_BY_ROW, active

OWN = [s for s in SPECS.values() if hasattr(s.torch_backend, "invariant_forward")]
DTYPES = (torch.float32, torch.bfloat16)
POINTS = [
    pytest.param(s, c, d, id=f"{s.name}-{c}-{str(d)[6:]}") for s in OWN for c in s.cases if not c.bench for d in DTYPES
]


@pytest.fixture(params=(1, 2), ids=("one_thread", "two_threads"))
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
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
    check(replace(spec, ulps=max(4, spec.ulps)), case, dtype, inside)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# A function of rows x[M, 96] for each op that maps rows to rows; the numbers beside them are no multiple of anything.
W, B96 = randn(96, seed=1), randn(96, seed=2)
ROWS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_rms_norm": lambda x, at: ops.add_rms_norm(x, x.flip(-1), W.to(x.dtype)),
    "cross_entropy": lambda x, at: ops.cross_entropy(x, at % 96),
    "geglu": lambda x, at: ops.geglu(x),
    "gelu": lambda x, at: ops.gelu(x),
    "kv_write": lambda x, at: _written(x, at),
    "layer_norm": lambda x, at: ops.layer_norm(x, W.to(x.dtype), B96.to(x.dtype)),
    "relu_squared": lambda x, at: ops.relu_squared(x),
    "rms_norm": lambda x, at: ops.rms_norm(x, W.to(x.dtype)),
    "rope": lambda x, at: _rotated(x, at),
    "scale_norm": lambda x, at: ops.scale_norm(x, torch.tensor([1.5])),
    "softmax": lambda x, at: ops.softmax(x),
    "swiglu": lambda x, at: ops.swiglu(x),
    "transpose": lambda x, at: ops.transpose(x, 0, 1).T,
}


def _written(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    cache = x.new_zeros(9, 16, 2, 48)
    ops.kv_write(cache, x.view(-1, 2, 48), at)
    return cache.flatten(0, 1)[at].flatten(1)


def _rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return ops.rope(x.view(-1, 4, 24), *ops.rope_tables(131, 12), at).flatten(1)


def outputs(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def parts(M: int) -> Iterator[tuple[int, int]]:
    """Spans of M rows: each alone, and pieces of several sizes."""
    for size in (1, 3, 7, 16, 64, 129):
        for begin in range(0, M - size + 1, 1 if size == 1 else 5):
            yield begin, begin + size


def test_every_row_by_row_op_is_tried_here() -> None:
    assert set(ROWS) == ROW_BY_ROW


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
    T, begin, end = 260, 41, 241  # one of three packed segments, 200 long
    q, k, v = (randn(T, h, 32, dtype=dtype, seed=s) for s, h in ((0, 4), (1, 2), (2, 2)))
    cu = torch.tensor([0, begin, end, T], dtype=torch.int32)
    with ops.invariant():
        trained = [x[begin:end] for x in ops.attention(q, k, v, cu, 200, **look)]
        alone = ops.attention(
            q[begin:end], k[begin:end], v[begin:end], cu[:2] * 0 + torch.tensor([0, 200]).int(), 200, **look
        )
        for chunk, block in ((1, 16), (7, 16), (64, 16), (200, 5)):
            pages = Paged(k[begin:end], v[begin:end], block)
            pieces = [pages.attend(q[begin:end], a, min(a + chunk, 200), **look) for a in range(0, 200, chunk)]
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
    x = randn(4, 8)
    with ops.invariant():
        with pytest.raises(BackendError, match="batch_norm has no invariant form"):
            ops.batch_norm(x, W[:8], B96[:8])
        with pytest.raises(BackendError, match="triton on cpu was asked for"):
            ops.rms_norm(x, W[:8], backend="triton")
        with pytest.raises(BackendError, match="torch on meta was asked for"):
            ops.rms_norm(x.to("meta"), W[:8].to("meta"))
        torch._dynamo.reset()
        with pytest.raises(Exception, match="asked for inside"):
            torch.compile(lambda: ops.rms_norm(x, W[:8]), fullgraph=True, backend="eager")()
