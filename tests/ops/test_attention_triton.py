"""The Triton backend of attention beyond the spec's cases: segments, repeated bits, who runs what, bad offsets."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from bagu.errors import BackendError
from bagu.ops import attention
from bagu.ops.attention import cuda
from bagu.ops.attention.spec import SPEC, Args
from bagu.ops.call import dispatch
from tests.ops.points import DEVICE
from tests.ops.test_attention import draw, offsets, terms

KINDS = [pytest.param(torch.float32, id="pointers"), pytest.param(torch.float16, id="tma")]


def run(leaves: list[torch.Tensor], cu: torch.Tensor, longest: int, **more: Any) -> list[torch.Tensor]:
    """out, lse and the gradients of a fixed dout."""
    leaves = [x.detach().to(DEVICE).requires_grad_() for x in leaves]
    out, lse = attention(*leaves, cu.to(DEVICE), longest, backend="triton", **more)
    dout = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("shape", [{}, {"causal": False}, {"window": 3, "causal": False}], ids=str)
def test_a_segment_has_the_same_bits_whatever_the_others_hold(dtype: torch.dtype, shape: dict[str, Any]) -> None:
    """NaN in the rows that follow a segment in memory must not reach it, forward or backward: 0 * NaN is NaN."""
    q, k, v, cu, longest = draw([3, 5, 4], dtype=dtype)
    other = [x.clone() for x in (q, k, v)]
    for x in other:
        x[:3], x[8:] = 1.0, torch.nan
    for y, z in zip(run([q, k, v], cu, longest, **shape), run(other, cu, longest, **shape), strict=True):
        assert torch.equal(y[3:8], z[3:8])


def test_blocks_before_the_window_are_not_read() -> None:
    """The loop multiplies the values of a block one iteration later: the first iteration must not read the block before
    the window, since 0 * NaN is NaN. The window of query 256 begins at 254, in the block of keys from 128 on."""
    q, k, v, cu, longest = draw([260], H=1, dtype=torch.float16)
    other = [x.clone() for x in (q, k, v)]
    other[1][:128], other[2][:128] = torch.nan, torch.nan
    (out, lse, dq, *_), (same, same_lse, same_dq, *_) = (
        run(leaves, cu, longest, window=3) for leaves in ([q, k, v], other)
    )
    for y, z in ((out, same), (lse, same_lse), (dq, same_dq)):
        assert torch.equal(y[256:], z[256:])


@pytest.mark.parametrize("dtype", KINDS)
def test_the_same_call_gives_the_same_bits(dtype: torch.dtype) -> None:
    q, k, v, cu, longest = draw([40, 5], G=1, dtype=dtype)
    first, second = (run([q, k, v], cu, longest) for _ in range(2))
    assert all(torch.equal(y, z) for y, z in zip(first, second, strict=True))


def test_a_query_whose_scores_are_all_hidden_has_zeros() -> None:
    q, k, v, cu, longest = draw([3, 2], dtype=torch.float16)
    q, k[:3] = q.abs() + 1, -torch.inf
    out, lse = (x.cpu() for x in run([q, k, v], cu, longest)[:2])
    assert not out[:3].any() and (lse[:3] == -torch.inf).all()
    exact = (x.double() for x in (q, k, v))
    want = SPEC.reference(Args(*exact, cu, None, None, None, longest, True, None, None, None))
    assert not want[0][:3].any() and (want[1][:3] == -torch.inf).all()
    assert out[3:].isfinite().all() and out[3:].any()


def test_a_sink_takes_its_share_of_the_weight() -> None:
    """All scores are equal, so a sink of the same height counts as one more key; one of -inf is none."""
    q, k, _, cu, longest = draw([4], G=2)
    v = torch.ones_like(k)
    found = [run([q * 0, k, v], cu, longest, sinks=torch.full((2,), s, device=DEVICE)) for s in (0.0, -torch.inf)]
    keys = torch.arange(1.0, 5.0).view(4, 1)
    for (out, lse, *_), total in zip(found, (keys + 1, keys), strict=True):
        torch.testing.assert_close(out.cpu(), (keys / total).unsqueeze(-1).expand(4, 2, 8))
        torch.testing.assert_close(lse.cpu(), total.log().expand(4, 2))


@pytest.mark.parametrize("wrong", [[0, 4, 99], [0, 5, 2, 6], [-3, 2, 6], [0, 3, 4], [9, 9, 9]], ids=str)
def test_wrong_offsets_stay_inside_the_tensors(wrong: list[int]) -> None:
    """Reading offsets would stop a GPU, so only debug mode refuses them; they must not read or write elsewhere."""
    q, k, v, _, _ = draw([4, 2], dtype=torch.float16)
    around = [torch.full((3 * x.shape[0], *x.shape[1:]), torch.nan, dtype=x.dtype) for x in (q, k, v)]
    inside = [a[6:12].copy_(x) for a, x in zip(around, (q, k, v), strict=True)]
    out, lse = attention(*(x.to(DEVICE) for x in inside), torch.tensor(wrong, dtype=torch.int32, device=DEVICE), 6,
                         backend="triton")  # fmt: skip
    assert out.shape == q.shape and lse.shape == q.shape[:2]
    assert all(a[:6].isnan().all() and a[12:].isnan().all() for a in around)


@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=9).filter(any),
    rows=st.sampled_from([16, 32]),
    from_end=st.booleans(),
)
@settings(max_examples=15, derandomize=True)
def test_the_work_list_has_every_block_once_and_heavy_ones_first(lengths: list[int], rows: int, from_end: bool) -> None:
    from bagu.ops.attention.work_list import list_tiles

    cu = offsets(lengths)
    tiles, count = list_tiles(cu.to(DEVICE), sum(lengths), max(lengths), rows, from_end=from_end)
    found = [tuple(t) for t in tiles[: 3 * count].view(-1, 3).tolist()]
    real = [t for t in found if t[1] > 0]
    want = {(a, b - a, i) for a, b in pairwise(cu.tolist()) for i in range(-(-(b - a) // rows))}
    assert len(real) == len(want) and set(real) == want and real == found[: len(real)]
    weights = [-(-n // rows) - i if from_end else i + 1 for _, n, i in real]
    assert weights == sorted(weights, reverse=True)


def fake(lengths: list[int], D: int = 64, dtype: torch.dtype = torch.bfloat16, **more: Any) -> dict[str, Any]:
    """The arguments of a call on a CUDA device, which need not be there."""
    T = sum(lengths)
    with FakeTensorMode():
        q = torch.empty(T, 2, D, dtype=dtype, device="cuda")
        cu = torch.empty(len(lengths) + 1, dtype=torch.int32, device="cuda")
    names = ("slopes", "bias", "sinks", "window", "scale", "softcap")
    return (
        dict.fromkeys(names)
        | {"q": q, "k": q, "v": q, "cu_seqlens": cu, "max_len": max(lengths), "causal": True}
        | more
    )


CHOICES = [
    ({"lengths": [8, 8]}, "torch"),  # cuDNN
    ({"lengths": [8, 8], "causal": False}, "torch"),
    ({"lengths": [8, 5]}, "triton"),
    ({"lengths": [8, 8], "window": 4}, "triton"),
    ({"lengths": [8, 8], "softcap": 30.0}, "triton"),
    ({"lengths": [8, 8], "sinks": torch.zeros(2)}, "triton"),
    ({"lengths": [8, 8], "slopes": torch.zeros(2)}, "triton"),
    ({"lengths": [8, 8], "D": 256}, "triton"),
    ({"lengths": [8, 8], "dtype": torch.float32}, "triton"),
]


@pytest.mark.parametrize("call, backend", CHOICES, ids=str)
def test_the_automatic_choice_is_the_measured_one(
    call: dict[str, Any], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "hopper", lambda device: True)
    assert dispatch.automatic_backend(SPEC, fake(**call)) == backend


def test_deterministic_mode_keeps_bits_that_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "hopper", lambda device: True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert dispatch.automatic_backend(SPEC, fake([8, 8])) == "triton"


def test_older_gpus_keep_flash_attention_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "hopper", lambda device: False)
    assert dispatch.automatic_backend(SPEC, fake([8, 5])) == "torch"
    assert dispatch.automatic_backend(SPEC, fake([8, 5], softcap=30.0)) == "triton"


@pytest.mark.parametrize(
    "call, words",
    [({"bias": torch.zeros(2, 3)}, "no learned bias"), ({"D": 320}, "heads of 256 features, and here is one of 320")],
)
def test_what_no_kernel_takes_falls_back_and_says_so_once(
    call: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "_warned", set())
    with pytest.warns(RuntimeWarning, match=f"attention runs on the torch backend here.*{words}"):
        assert dispatch.automatic_backend(SPEC, fake([8, 5], **call)) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert dispatch.automatic_backend(SPEC, fake([8, 5], **call)) == "torch"


def test_a_call_that_asks_for_what_no_kernel_takes_is_refused() -> None:
    q, k, v, cu, longest = (x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in draw([4, 2]))
    with pytest.raises(BackendError, match="triton backend was asked for, and its kernels have no learned bias"):
        attention(q, k, v, cu, longest, backend="triton", bias=terms({"bias": True})["bias"].to(DEVICE))
    wide = torch.zeros(6, 2, 264, device=DEVICE)
    with pytest.raises(BackendError, match="heads of 256 features, and here is one of 264"):
        attention(wide, wide, wide, cu, longest, backend="triton")
