"""Invariant mode on Triton: against the fp64 reference, and bit for bit between batches.

Without a GPU the kernels run in Triton's interpreter, in fp32 and at small sizes. On a GPU they run in bf16 as well,
at the sizes of a 0.6B model, where the fast kernels choose tiles by the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from bagu import ops
from bagu.errors import BackendError
from bagu.ops.call.dispatch import call
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case, OpSpec, check
from bagu.ops.invariant.mode import ELEMENTWISE_ON_GPU, ROW_BY_ROW
from tests.ops.block_sparse import check_company
from tests.ops.points import DEVICE, GPU, eight_bits, small, supported

OWN = ("attention", "block_attention", "choose_blocks", "cross_entropy", "grouped_matmul", "layer_norm",
       "linear_cross_entropy", "linear_cross_entropy_loss", "matmul", "paged_attention", "sample")  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16) if GPU else (torch.float32,)
# The interpreter takes 0.1 to 1 s per case; conformance runs every case of the same kernels in fast mode.
POINTS = [
    pytest.param(s, c, d, id=f"{s.name}-{c}-{str(d)[6:]}")
    for s in (SPECS[name] for name in OWN)
    for c in [c for c in small(s) if supported(s, "triton", c) and not eight_bits(s, c)][: None if GPU else 8]
    for d in DTYPES
]  # fmt: skip


@pytest.fixture(autouse=True)
def sums_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of the interpreter is NumPy's, and on x86 without AVX-512 the order in which OpenBLAS adds depends on
    the place of a row in the tile. On a GPU it does not."""
    if GPU:
        return

    def create_dot(self: Any, a: Any, b: Any, d: Any, *precision: Any) -> Any:
        product = np.einsum("...ik,...kj->...ij", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize("spec, case, dtype", POINTS)
def test_conformance(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    def inside(**args: Any) -> Any:
        with ops.invariant():
            return call(spec, "triton", **args)  # its gradients are asked for outside

    check(replace(spec, ulps=max(4, spec.ulps)), case, dtype, inside, backend="triton", device=DEVICE)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


# A function of rows x[M, N] for each op that maps rows to rows; `fixed` has 3 N numbers for gains.
ROWS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_rms_norm": lambda x, g: ops.add_rms_norm(x, x.flip(-1), g[0]),
    "cross_entropy": lambda x, g: ops.cross_entropy(x, x.argmin(-1), label_smoothing=0.1),
    "cross_entropy, odd": lambda x, g: ops.cross_entropy(x[:, 1:].contiguous(), x.argmin(-1) % 9),
    "dequantize_int8": lambda x, g: ops.dequantize_int8((40 * x).char(), x[:, 0].float(), dtype=x.dtype),
    "geglu": lambda x, g: ops.geglu(x),
    "layer_norm": lambda x, g: ops.layer_norm(x, g[0], g[1]),
    "relu_squared": lambda x, g: ops.relu_squared(x),
    "rms_norm": lambda x, g: ops.rms_norm(x, g[0]),
    "rope": lambda x, g: ops.rope(x.unflatten(1, (4, -1)), *_tables(x)).flatten(1),
    "rope_kv_write": lambda x, g: _prepared(x, g),
    "sample": lambda x, g: _sampled(x),
    "scale_norm": lambda x, g: ops.scale_norm(x, g[0, :1]),
    "softmax": lambda x, g: ops.softmax(x, 0.3),
    "swiglu": lambda x, g: ops.swiglu(x),
    "transpose": lambda x, g: ops.transpose(x, 0, 1).T,
}


def _sampled(x: torch.Tensor) -> torch.Tensor:
    """Random numbers of a row by its first number, so that they travel with the row."""
    one, u = torch.ones(len(x), device=x.device), x[:, 0].float().abs().frac()
    return ops.sample(x, 0.8 * one, (40 * one).long(), 0.9 * one, 0.01 * one, u)


def _prepared(x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Queries, and the keys and values that are in the cache afterwards."""
    (M, N), at = x.shape, torch.arange(len(x), device=x.device)
    caches = [x.new_zeros(-(-M // 16), 16, 1, N // 4) for _ in range(2)]
    cos, sin = _tables(x)
    weights = {"q_weight": g[0, : N // 4], "k_weight": g[1, : N // 4]}
    q = ops.rope_kv_write(x.view(M, 1, 4, N // 4), at, *caches, cos=cos, sin=sin, **weights)
    return torch.cat((q.flatten(1), *(cache.flatten(0, 1)[:M].flatten(1) for cache in caches)), 1)


def _tables(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Angles of a row by its first number, so that they travel with the row."""
    angles = x[:, :1].float() * torch.arange(x.shape[1] // 8, device=x.device)
    return angles.cos(), angles.sin()


def outputs(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def test_every_op_with_an_invariant_form_is_tried() -> None:
    kernels = {s.name for s in SPECS.values() if "triton" in s.backends}
    own = {s.name for s in SPECS.values() if s.name in kernels and hasattr(s.module("triton"), "invariant_forward")}
    assert own == set(OWN)
    tried = {name.split(",")[0] for name in ROWS} | {"attention", "paged_attention", "matmul", "grouped_matmul"}
    tried |= {"choose_blocks", "block_attention"}
    heads = {"linear_cross_entropy", "linear_cross_entropy_loss"}
    composed = {s.name for s in SPECS.values() if s.composed}
    assert tried | heads == own | composed | (ROW_BY_ROW | ELEMENTWISE_ON_GPU) & kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N", [96, 1024, 4096, 5632, 40_000] if GPU else [96])
@pytest.mark.parametrize("name", sorted(ROWS))
def test_rows_of_a_batch_are_those_rows_alone(name: str, N: int, dtype: torch.dtype) -> None:
    M = 2000 if GPU else 9
    x, gains = randn(M, N, dtype=dtype), randn(3, N, dtype=dtype, seed=1)
    with ops.invariant(), ops.use("triton"):
        whole = outputs(ROWS[name](x, gains))
        for n in (n for n in (1, 2, 7, 16, 33, 129, 600) if n < M):
            for at in (0, 1, M // 2, M - n):
                part = slice(at, at + n)
                for y, z in zip(whole, outputs(ROWS[name](x[part].clone(), gains)), strict=True):
                    assert torch.equal(y[part], z), f"{n} rows from {at} on"


WEIGHTS = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024), (333, 200)]  # [out, in]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, K", WEIGHTS if GPU else [(40, 70), (33, 16)])
def test_products_of_any_number_of_rows(N: int, K: int, dtype: torch.dtype) -> None:
    M = 600 if N > 10_000 else 2100 if GPU else 70
    x, w, bias = randn(M, K, dtype=dtype), randn(N, K, dtype=dtype, seed=1), randn(N, dtype=dtype, seed=2)
    with ops.invariant(), ops.use("triton"):
        whole = ops.matmul(x, w, bias)
        for n in (n for n in (1, 2, 7, 33, 64, 65, 128, 256, 500, 1024, 2048) if n <= M):
            for at in {0, M // 3, M - n}:
                part = slice(at, min(at + n, M))
                assert torch.equal(ops.matmul(x[part], w, bias), whole[part]), f"{n} rows from {at} on"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, K", [(1536, 2048), (2880, 2880), (333, 200)] if GPU else [(40, 70)])
def test_an_experts_rows_do_not_see_how_many_they_are(N: int, K: int, dtype: torch.dtype) -> None:
    E, T = (16, 4000) if GPU else (3, 45)
    x, w = randn(T, K, dtype=dtype), randn(E, N, K, dtype=dtype, seed=1)
    with ops.invariant(), ops.use("triton"):
        whole = ops.grouped_matmul(x, w, torch.full((E,), T, dtype=torch.int32, device=DEVICE))  # all to the first
        for n in (n for n in (1, 3, 40, 100, 1000) if n <= T):  # the first has the last n rows, another one the others
            ends = torch.tensor([n] + [T] * (E - 1), dtype=torch.int32, device=DEVICE)
            got = ops.grouped_matmul(x.roll(n, 0), w, ends)
            assert torch.equal(got[:n], whole[T - n :]), f"{n} rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [151_936, 50_257, 999] if GPU else [37])
def test_logprobs_of_any_number_of_tokens(V: int, dtype: torch.dtype) -> None:
    M, D = (300, 1024) if GPU else (5, 16)
    hidden, head = randn(M, D, dtype=dtype), randn(V, D, dtype=dtype, seed=1) * D**-0.5
    targets = torch.arange(M, device=DEVICE) * 7 % V
    with ops.invariant(), ops.use("triton"):
        whole = ops.linear_cross_entropy(hidden, head, targets)
        for n in (n for n in (1, 2, 7, 64, 200) if n < M):
            part = slice(M - n, M)
            for memory in (None, 3 * 4 * V):
                found = ops.linear_cross_entropy(hidden[part], head, targets[part], -100, memory)
                for y, z in zip(whole, found, strict=True):
                    assert torch.equal(y[part], z), f"{n} tokens, {memory} bytes"
        weights = torch.ones(M, device=DEVICE)
        _, *trained = ops.linear_cross_entropy_loss(hidden.requires_grad_(), head, targets, weights)[:3]
        for y, z in zip(whole, trained, strict=True):
            assert torch.equal(y, z)


class Paged:
    """Two pools whose blocks are handed out in no order, filled and attended to as an engine does."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, block: int) -> None:
        self.k, self.v, self.B = k, v, block
        count = -(-k.shape[0] // block)
        order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(5))
        self.table = order[:count].to(DEVICE, torch.int32)
        self.pools = [x.new_full((count + 3, block, *x.shape[1:]), torch.nan) for x in (k, v)]
        slots = self.table.long().repeat_interleave(block) * block + torch.arange(count * block, device=DEVICE) % block
        for pool, x in zip(self.pools, (k, v), strict=True):
            pool.flatten(0, 1)[slots[: len(x)]] = x

    def attend(self, q: torch.Tensor, spans: list[tuple[int, int]], **more: Any) -> list[tuple[torch.Tensor, ...]]:
        """The queries of each span of positions, all spans in one call; the results of each span."""
        tensor = lambda n: torch.tensor(n, dtype=torch.int32, device=DEVICE)  # noqa: E731
        sizes = [end - begin for begin, end in spans]
        queries = torch.cat([q[begin:end] for begin, end in spans])
        found = ops.paged_attention(
            queries, *self.pools, self.table.expand(len(spans), -1).contiguous(),
            tensor([0, *sizes]).cumsum(0).int(), tensor([end for _, end in spans]), max(sizes),
            max(end for _, end in spans), **more,
        )  # fmt: skip
        return list(zip(*(x.split(sizes) for x in found), strict=True))


HEADS = 16 if GPU else 4
LOOKS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 37}, "slopes": {"slopes": 2.0 ** -torch.arange(1, HEADS + 1)},
    "sinks": {"sinks": torch.arange(HEADS) / 4},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("D", [64, 128, 256] if GPU else [16])
def test_packed_attention_is_paged_attention_in_any_chunks(D: int, look: str, dtype: torch.dtype) -> None:
    L, others = (1500, 77) if GPU else (70, 5)
    more = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in LOOKS[look].items()}
    T, mine = L + 2 * others, slice(others, others + L)
    q, k, v = (randn(T, h, D, dtype=dtype, seed=s) for s, h in ((0, HEADS), (1, HEADS // 2), (2, HEADS // 2)))
    cu = torch.tensor([0, others, others + L, T], dtype=torch.int32, device=DEVICE)
    chunks = ((1, 16), (7, 16), (64, 32), (L, 128)) if GPU else ((7, 16), (33, 5), (L, 16))
    with ops.invariant(), ops.use("triton"):
        trained = [x[mine] for x in ops.attention(q, k, v, cu, L, **more)]
        for chunk, block in chunks:
            pages = Paged(k[mine], v[mine], block)
            spans = [(a, min(a + chunk, L)) for a in range(0, L, chunk)]
            for (a, b), found in zip(spans, pages.attend(q[mine], spans, **more), strict=True):
                for want, got in zip(trained, found, strict=True):
                    assert torch.equal(want[a:b], got), f"positions {a} to {b} in chunks of {chunk}"
        for at in (0, 1, 15, 16, 63, 64, L - 1):  # alone
            for want, got in zip(trained, pages.attend(q[mine], [(at, at + 1)], **more)[0], strict=True):
                assert torch.equal(want[at : at + 1], got), f"position {at} alone"


@pytest.mark.parametrize("dtype", DTYPES)
def test_block_sparse_attention_of_a_text_in_any_company(dtype: torch.dtype) -> None:
    lengths, D = ((37, 1500, 1, 22), 128) if GPU else ((9, 45, 1), 16)
    q, k, v = (
        randn(sum(lengths), h, D, dtype=dtype, seed=s) for s, h in ((0, HEADS), (1, HEADS // 2), (2, HEADS // 2))
    )
    with ops.invariant(), ops.use("triton"):
        check_company(q, k, v, lengths)


def test_what_has_no_invariant_kernel_is_refused() -> None:
    x, w = randn(4, 8), randn(8, seed=1)
    with ops.invariant():
        with pytest.raises(BackendError, match="batch_norm has no invariant form"):
            ops.batch_norm(x, w, w, backend="triton")
        with pytest.raises(BackendError, match=r"torch\.func"), ops.use("triton"):
            torch.func.vmap(lambda row: ops.rms_norm(row, w))(x)


@pytest.mark.gpu
def test_the_torch_backend_on_a_gpu_is_refused() -> None:
    x = randn(4, 8)
    with ops.invariant(), pytest.raises(BackendError, match="torch on cuda was asked for"):
        ops.rms_norm(x, x[0], backend="torch")


@pytest.mark.gpu
def test_fast_mode_does_not_keep_the_promise() -> None:
    """Otherwise the tests above would prove nothing."""

    def depends_on_the_batch(N: int, K: int) -> bool:
        x, w = randn(300, K, dtype=torch.bfloat16), randn(N, K, dtype=torch.bfloat16, seed=1)
        return any(not torch.equal(ops.matmul(x[:M], w), ops.matmul(x, w)[:M]) for M in (1, 2, 7, 33, 64))

    assert any(depends_on_the_batch(N, K) for N, K in ((1024, 2048), (256, 8192), (4096, 4096)))
