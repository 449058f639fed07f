"""int8_attention: its error against exact attention, refusals, and heads that the kernels do not have."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from bagu import ops
from bagu.errors import ArgumentError, BackendError
from bagu.ops.attention import spec as attention
from bagu.ops.contract.core import Streams
from bagu.ops.int8_attention.spec import GROUP
from tests.ops.points import DEVICE

LENGTHS = (200, 37)


def tensors(D: int, *, shift: float = 0.0, H: int = 2, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    """q, k, v in fp64, and cu_seqlens. Every key of a head has the same `shift` added, as a model's keys have."""
    streams, T = Streams("int8_attention", D), sum(lengths)
    q, k, v = (streams.normal(name, T, H, D) for name in "qkv")
    k = k + shift * streams.normal("shift", 1, H, D)
    return [q, k, v, torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, causal: bool) -> torch.Tensor:
    none = dict.fromkeys(("slopes", "bias", "sinks", "window", "scale", "softcap"))
    out, _ = attention.reference(attention.Args(q, k, v, cu_seqlens, max_len=0, causal=causal, **none))
    return out


def predicted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, causal: bool) -> float:
    """The root mean square error of `out` if q and k are rounded to int8, to first order.

    A rounding error is uniform over a step, so its variance is step^2 / 12, and it is independent of the others. With
    weights p and scores s = scale * q . k, the error of out[i] is sum_j p[i, j] (v[j] - out[i]) ds[i, j], where
    ds[i, j] = scale * (dq[i] . k[j] + q[i] . dk[j]).
    """
    scale, squares = q.shape[-1] ** -0.5, []
    for begin, end in pairwise(cu_seqlens.tolist()):
        for h in range(q.shape[1]):
            queries, keys, values = (x[begin:end, h] for x in (q, k, v))
            keys = keys - keys.mean(0)
            s = scale * queries @ keys.mT
            s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -torch.inf) if causal else s
            p = s.softmax(-1)
            away = values - (p @ values).unsqueeze(1)  # v[j] - out[i], as [i, j, features]
            step_q = queries.abs().amax(1) / 127
            step_k = torch.cat([x.abs().amax().expand(len(x)) / 127 for x in keys.split(GROUP)])
            by_queries = torch.einsum("ij,ije,jd->ied", p, away, keys).square().sum(2) * step_q.square().unsqueeze(1)
            by_keys = torch.einsum("ij,ije->ie", (p * step_k).square(), away.square())
            by_keys = by_keys * queries.square().sum(1, keepdim=True)
            squares.append(scale**2 / 12 * (by_queries + by_keys))
    return float(torch.cat(squares).mean().sqrt())


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("D, causal, shift", [(64, True, 5.0), (128, False, 0.0)])
def test_the_error_is_that_of_rounding_to_int8(backend: str, D: int, causal: bool, shift: float) -> None:
    """A sum of n independent squares is within 4 * sqrt(2 / n) of its mean. Here n is at least the number of queries.

    Without the mean taken off, keys with a shift would have steps several times as large.
    """
    q, k, v, cu = tensors(D, shift=shift)
    given = [x.float().to(DEVICE) for x in (q, k, v)]
    out = ops.int8_attention(*given, cu.to(DEVICE), max(LENGTHS), causal=causal, backend=backend)
    error = (out.double().cpu() - exact(q, k, v, cu, causal)).square().mean()
    ratio = float(error) / predicted(q, k, v, cu, causal) ** 2
    assert abs(ratio - 1) < 4 * (2 / (q.shape[0] * q.shape[1])) ** 0.5


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_keys_that_are_all_equal_have_the_same_weight(backend: str) -> None:
    """Without their mean they are zeros, whose step is 0; a score of -inf times 0 would be NaN."""
    q, k, v = (torch.randn(7, 1, 64, generator=torch.Generator().manual_seed(0)) for _ in range(3))
    given = [x.to(DEVICE) for x in (q, k[:1].expand(7, 1, 64), v, torch.tensor([0, 7], dtype=torch.int32))]
    out = ops.int8_attention(*given, 7, backend=backend)
    torch.testing.assert_close(out.cpu(), v.cumsum(0) / torch.arange(1, 8).view(7, 1, 1))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_there_are_no_gradients(backend: str) -> None:
    q, k, v, cu = (x.to(DEVICE) for x in tensors(64, lengths=(5, 3)))
    q, k, v = (x.float().requires_grad_() for x in (q, k, v))
    assert not ops.int8_attention(q, k, v, cu, 5, backend=backend).requires_grad


def test_wrong_arguments_are_named() -> None:
    q, k, v, cu = (x.to(DEVICE) for x in tensors(64, H=3, lengths=(5, 3)))
    with pytest.raises(ArgumentError, match="q has 3 heads and k has 2"):
        ops.int8_attention(q, k[:, :2], v[:, :2], cu, 5)
    with pytest.raises(ArgumentError, match="2 segments of at most max_len = 3, and there are 8 tokens"):
        ops.int8_attention(q, k, v, cu, 3)
    with pytest.raises(ArgumentError, match="scale is -1"):
        ops.int8_attention(q, k, v, cu, 5, scale=-1.0)


def test_heads_that_the_kernels_do_not_have_run_on_torch() -> None:
    q, k, v, cu = (x.to(DEVICE) for x in tensors(80, lengths=(5, 3)))
    with pytest.raises(BackendError, match="heads of 64 or 128 features, not 80"):
        ops.int8_attention(q, k, v, cu, 5, backend="triton")
    assert ops.int8_attention(q, k, v, cu, 5).shape == q.shape
