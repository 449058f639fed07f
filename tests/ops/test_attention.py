"""Attention beyond the spec's cases: segments do not affect each other, every path is the one meant, bad calls."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.ops import attention, linear_attention, positive_features, rope, rope_tables
from bagu.ops.attention.shape import Shape
from bagu.ops.attention.torch_backend import Path, path

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any)
SHAPES: list[dict[str, Any]] = [
    {}, {"causal": False}, {"window": 2}, {"slopes": True}, {"bias": True}, {"sinks": True}, {"softcap": 0.5},
]  # fmt: skip


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def draw(lengths: list[int], H: int = 2, G: int = 1, D: int = 8, dtype: torch.dtype = torch.float32) -> list[Any]:
    """q, k, v, cu_seqlens, max_len."""
    T, seed = sum(lengths), torch.Generator().manual_seed(sum(lengths))
    q, k, v = (torch.randn(T, heads, D, generator=seed, dtype=torch.float64).to(dtype) for heads in (H, G, G))
    return [q, k, v, offsets(lengths), max(lengths)]


def terms(shape: dict[str, Any], H: int = 2) -> dict[str, Any]:
    drawn = {
        "slopes": torch.linspace(0.1, 0.5, H),
        "bias": torch.linspace(-1, 1, 5 * H).view(H, 5),
        "sinks": torch.linspace(-1, 1, H),
    }
    return {k: drawn.get(k, v) for k, v in shape.items()}


@given(lengths=LENGTHS, shape=st.sampled_from(SHAPES), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40, derandomize=True)
def test_a_segment_has_the_same_bits_whatever_the_others_hold(
    lengths: list[int], shape: dict[str, Any], dtype: torch.dtype
) -> None:
    q, k, v, cu, longest = draw(lengths, dtype=dtype)
    chosen = max(range(len(lengths)), key=lambda s: lengths[s])
    begin, end = int(cu[chosen]), int(cu[chosen + 1])
    before = attention(q, k, v, cu, longest, **terms(shape))
    other = [x.clone() for x in (q, k, v)]
    for x in other:
        x[:begin] += 1
        x[end:] = torch.nan
    after = attention(*other, cu, longest, **terms(shape))
    for y, z in zip(before, after, strict=True):
        assert torch.equal(y[begin:end], z[begin:end])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_gradient_crosses_a_segment(shape: dict[str, Any]) -> None:
    *tensors, cu, longest = draw([4, 1, 6])
    leaves = [x.requires_grad_() for x in tensors]
    out, lse = attention(*leaves, cu, longest, **terms(shape))
    assert not lse.requires_grad
    out[4:5].sum().backward()
    for x in leaves:
        assert x.grad is not None and not x.grad[:4].any() and not x.grad[5:].any()
    if "sinks" not in shape:  # both heads read its value
        assert torch.equal(tensors[2].grad[4], torch.full((1, 8), 2.0))  # type: ignore[index]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_call_and_a_call_for_each_run_agree(shape: dict[str, Any]) -> None:
    """cu_seqlens filled up with T takes the custom op; the same segments without it take the plain call."""
    found = []
    for fill in (0, 3):
        *tensors, cu, longest = draw([6, 6, 6] + [0] * fill)
        leaves = [x.requires_grad_() for x in tensors]
        wanted = Path.CPU_RAGGED if fill else Path.CPU_EQUAL
        assert path(leaves[0], leaves[2], cu, longest, Shape(causal=True)) is wanted
        torch.manual_seed(0)
        out, lse = attention(*[x + 0 for x in leaves], cu, longest, **terms(shape))
        out.backward(torch.randn(out.shape))
        found.append([out.detach(), lse, *(x.grad for x in leaves)])
    bits = "bias" not in shape  # there autograd and the written backward sum in different orders
    for y, z in zip(*found, strict=True):
        assert torch.equal(y, z) if bits else torch.allclose(y, z, rtol=1e-5, atol=1e-6)


def test_lse_is_the_logsumexp_of_the_scores() -> None:
    q, k, v, cu, longest = draw([5, 7], dtype=torch.float64)
    _, lse = attention(q, k, v, cu, longest, causal=False, scale=0.5)
    for a, b in ((0, 5), (5, 12)):
        scores = 0.5 * torch.einsum("ihd,jd->ihj", q[a:b], k[a:b, 0])
        torch.testing.assert_close(lse[a:b], scores.logsumexp(-1))


def test_a_window_of_one_sees_itself_alone() -> None:
    q, k, v, cu, longest = draw([5, 3], G=2)
    out, lse = attention(q, k, v, cu, longest, window=1)
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(lse, (q * k).sum(-1) * 8**-0.5)


def test_gradients_of_a_plain_sum() -> None:
    """The incoming gradient is then one number with strides of 0, which a kernel must not read as a row."""
    *tensors, cu, longest = draw([4, 4])
    for sizes in (cu, torch.cat((cu, cu[-1:]))):
        leaves = [x.detach().requires_grad_() for x in tensors]
        out, _ = attention(*leaves, sizes, longest)
        lazy = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
        full = torch.autograd.grad(out, leaves, torch.ones(out.shape))
        assert all(torch.equal(a, b) for a, b in zip(lazy, full, strict=True))


def test_t5_buckets_learn_through_the_bias() -> None:
    """nn makes bias = table[:, bucket(distance)]; a bucket's gradient is the sum of its distances'."""
    *tensors, cu, longest = draw([6, 3], dtype=torch.float64)
    table = torch.randn(2, 3, dtype=torch.float64).requires_grad_()
    bucket = torch.tensor([2, 1, 1, 0, 0, 0, 0])  # of the distances -3 … 3
    run = lambda t: attention(*tensors, cu, longest, bias=t[:, bucket])[0]  # noqa: E731
    assert torch.autograd.gradcheck(run, (table,))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_ragged_path_is_a_sound_custom_op(shape: dict[str, Any]) -> None:
    q, k, v, cu, longest = draw([5, 1, 3, 3, 0])
    names = ("slopes", "bias", "sinks", "window", "softcap")
    more = dict.fromkeys(names) | {"causal": True} | terms(shape)
    args = [q, k, v, cu, *(more[n] for n in names[:3]), longest, more["causal"], more["window"], 0.3, more["softcap"]]
    for i in (0, 1, 2, 5, 6):
        args[i] = None if args[i] is None else args[i].requires_grad_()
    torch.library.opcheck(torch.ops.bagu.attention_ragged.default, tuple(args))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ragged_segments_compile_as_one_graph(shape: dict[str, Any]) -> None:
    *tensors, cu, longest = draw([5, 1, 3, 0])
    leaves = [x.requires_grad_() for x in tensors]
    torch._dynamo.reset()
    run = lambda *a: attention(*a, cu, longest, **terms(shape))[0]  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(run(*leaves).square().sum(), leaves)
    got = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    for w, g in zip(want, got, strict=True):
        assert torch.equal(w, g)


def test_no_tokens_give_no_results() -> None:
    q = torch.zeros(0, 2, 8, requires_grad=True)
    for cu in (torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)):
        out, lse = attention(q, q, q, cu, 4)
        assert out.shape == (0, 2, 8) and lse.shape == (0, 2)
        assert torch.autograd.grad(out.sum(), q)[0].shape == q.shape


@pytest.mark.parametrize(
    "make",
    [dict, lambda: {"window": 0}, lambda: {"bias": torch.zeros(2, 4)}, lambda: {"scale": -0.5}, lambda: {"softcap": 0}],
)
def test_sizes_that_cannot_be_are_refused(make: Any) -> None:
    q, k, v, cu, longest = draw([4, 2])
    more = make()
    with pytest.raises(ArgumentError, match="attention: "):
        attention(q, k, v, cu, longest if more else 2, **more)
    with pytest.raises(ArgumentError, match="2 heads and k has 0"):
        attention(q, k[:, :0], v[:, :0], cu, longest)
    three = q.new_zeros(6, 3, 8)
    with pytest.raises(ArgumentError, match="2 heads and k has 3"):
        attention(q, three, three, cu, longest)


@pytest.mark.parametrize("wrong", [[0, 4, 5], [1, 4, 6], [0, 5, 3, 6], [0, 6, 6]])
def test_wrong_offsets_are_refused_where_they_are_read(wrong: list[int]) -> None:
    q, k, v, _, _ = draw([4, 2])
    with pytest.raises(ArgumentError, match="cu_seqlens is"):
        attention(q, k, v, torch.tensor(wrong, dtype=torch.int32), 4 if len(wrong) == 3 else 5)


@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=5).filter(any), causal=st.booleans())
@settings(max_examples=25, derandomize=True)
def test_linear_attention_keeps_segments_apart(lengths: list[int], causal: bool) -> None:
    """A segment alone, at any place in its chunk, gives what it gives beside others, up to the order of sums."""
    q, k, v, cu, longest = draw(lengths, G=2, dtype=torch.float64)
    q, k = positive_features(q), positive_features(k)
    packed = linear_attention(q, k, v, cu, longest, causal=causal)
    for a, b in zip(cu.tolist(), cu.tolist()[1:], strict=False):
        alone = linear_attention(q[a:b], k[a:b], v[a:b], offsets([b - a]), max(1, b - a), causal=causal)
        torch.testing.assert_close(packed[a:b], alone)


def test_linear_attention_with_rope_depends_on_distance_alone() -> None:
    """Rotated above, unrotated below: moving a segment's positions changes nothing."""
    q, k, v, cu, longest = draw([70, 5], G=2, dtype=torch.float64)
    fq, fk = positive_features(q), positive_features(k)
    cos, sin = (t.double() for t in rope_tables(200, 4))
    outs = []
    for shift in (0, 100):
        positions = torch.cat((torch.arange(70), torch.arange(5))) + shift
        turned = [rope(x, cos, sin, positions) for x in (fq, fk)]
        outs.append(linear_attention(*turned, v, cu, longest, norm_q=fq, norm_k=fk))
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)  # the tables are fp32
    assert not torch.allclose(outs[0], linear_attention(fq, fk, v, cu, longest))


def test_positive_features_are_elu_plus_one_with_finite_gradients() -> None:
    x = torch.tensor([-200.0, -1.0, 0.0, 2.0, 1e4], requires_grad=True)
    y = positive_features(x)
    torch.testing.assert_close(y, torch.nn.functional.elu(x) + 1)
    assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_a_normaliser_is_a_pair() -> None:
    q, k, v, cu, longest = draw([4, 2], G=2)
    with pytest.raises(ArgumentError, match="norm_q is given and norm_k is not"):
        linear_attention(q, k, v, cu, longest, norm_q=q)
