"""Sampling: each filter by its definition, and the same tokens for a seed in any batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.serve.request import Sampling
from bagu.serve.sample import Row, _adjust, _filter, _inverse_cdf, argmax, probabilities, sample, top_logprobs

V = 40


def row(sampling: Sampling, *, seed: int = 0, output: tuple[int, ...] = (), prompt: tuple[int, ...] = (1,)) -> Row:
    return Row(sampling, seed, 0, (*prompt, *output), len(prompt), (V - 1,))


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


SAMPLINGS = st.builds(
    Sampling,
    max_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 3, 100]),
    top_p=st.sampled_from([0.1, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 5.0}]),
    min_tokens=st.sampled_from([0, 4]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(SAMPLINGS, min_size=1, max_size=5))
def test_a_row_samples_the_same_alone_and_in_any_batch(samplings: list[Sampling]) -> None:
    x = logits(len(samplings))
    rows = [row(s, seed=i, output=(3, 3, 7)) for i, s in enumerate(samplings)]
    together = sample(x, rows).tolist()
    assert together == [int(sample(x[i : i + 1], [r])) for i, r in enumerate(rows)]
    assert torch.equal(x, logits(len(samplings)))  # unchanged: the logprobs still need them


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 99), st.sampled_from([None, 1, 5, V]), st.sampled_from([0.2, 0.9, 1.0]), st.sampled_from([0.0, 0.3])
)
def test_filters_match_their_definitions(seed: int, top_k: int | None, top_p: float, min_p: float) -> None:
    p = logits(1, seed).softmax(-1)
    kept = _filter(p, [Sampling(top_k=top_k, top_p=top_p, min_p=min_p)])[0]
    ranked = sorted(range(V), key=lambda i: -p[0, i].item())
    want = [i for i in ranked if p[0, i] >= min_p * p.max()]
    want = want[: V if top_k is None else top_k]
    total, height, nucleus = sum(p[0, i].item() for i in want), 0.0, []
    for i in want:
        if height >= top_p * total - 1e-6 and top_p < 1.0:
            break
        nucleus.append(i)
        height += p[0, i].item()
    assert set(kept.nonzero().flatten().tolist()) == set(nucleus)
    assert torch.equal(kept[kept > 0], p[0][kept > 0])


def test_tokens_as_probable_as_the_last_kept_one_are_kept() -> None:
    p = torch.tensor([[0.4, 0.2, 0.2, 0.2]])
    assert int((_filter(p, [Sampling(top_k=2)]) > 0).sum()) == 4
    assert int((_filter(p, [Sampling(top_p=0.4)]) > 0).sum()) == 1


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=6).filter(any), st.floats(0, 1, width=32))
def test_inverse_cdf_selects_at_u_and_never_probability_0(p: list[float], u: float) -> None:
    token = int(_inverse_cdf(torch.tensor([p]), torch.tensor([u])))
    assert p[token] > 0
    assert sum(p[:token]) <= u * sum(p) + 1e-6 and (u * sum(p) <= sum(p[: token + 1]) + 1e-6)


def test_samples_follow_the_probabilities() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0]]).expand(4000, 3)
    rows = [Row(Sampling(temperature=0.5), i, 0, (0,), 1) for i in range(4000)]
    found = torch.bincount(sample(x, rows), minlength=3) / 4000
    want = (x[0] / 0.5).softmax(-1)
    torch.testing.assert_close(found, want, atol=0.03, rtol=0)  # 4 sigma of 4000 draws is 0.03


def test_penalties_bias_and_masked_stop_tokens_match_their_formulas() -> None:
    x = logits(1)
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    s = Sampling(max_tokens=9, logit_bias={5: 4.0}, min_tokens=4, stop_token_ids=(8,), **penalties)
    got = _adjust(x, [row(s, prompt=(1, 2), output=(2, 2, 6))])[0]
    want = x[0].clone()
    for t in (1, 2, 6):
        want[t] = want[t] / 2 if want[t] > 0 else want[t] * 2
    want[2] -= 0.5 + 0.25 * 2
    want[6] -= 0.5 + 0.25
    want[5] += 4
    want[[8, V - 1]] = -torch.inf
    torch.testing.assert_close(got, want)
    done = _adjust(x, [row(s, prompt=(1, 2), output=(2, 2, 6, 6))])[0]
    assert done[8] > -torch.inf


def test_temperature_sharpens() -> None:
    x = logits(1)
    torch.testing.assert_close(probabilities(x, [row(Sampling(temperature=0.25))]), (x * 4).softmax(-1))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=1, temperature=1.0, top_p=1e-50),  # 0 in fp32
        Sampling(max_tokens=1, temperature=1e-46),  # a subnormal in fp32, or 0
        Sampling(max_tokens=1, temperature=5e-324, top_k=3, top_p=0.5, min_p=0.5),
        Sampling(max_tokens=1, temperature=1e-46, repetition_penalty=0.01, presence_penalty=2.0),
    ],
)
def test_extreme_settings_sample_the_most_probable_token(sampling: Sampling) -> None:
    x = logits(1)
    x[0, 1] = -30.0  # the prompt's token, to which the penalty applies
    assert sample(x, [row(sampling)]).tolist() == [int(x.argmax())]


def test_no_token_is_masked_if_all_would_end_the_output() -> None:
    every = Sampling(max_tokens=8, min_tokens=3, stop_token_ids=tuple(range(V)), temperature=1.0)
    p = probabilities(_adjust(logits(1), [row(every)]), [row(every)])
    assert torch.isfinite(p).all() and p.sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_argmax_is_the_first_largest(dtype: torch.dtype) -> None:
    x = torch.zeros(3, V, dtype=dtype)
    x[1, [4, 9]] = 1.0
    x[2, 9] = 1.0
    assert argmax(x).tolist() == [0, 4, 9]


def test_top_logprobs_are_those_of_a_log_softmax() -> None:
    x, targets = logits(3), torch.tensor([1, 5, 30])
    true = x.log_softmax(-1)
    own = true.gather(1, targets.unsqueeze(1)).squeeze(1)
    found = top_logprobs(x, own, targets, [2, 0, 4]).lists()
    assert [len(f.top) for f in found] == [2, 0, 4]
    for i, f in enumerate(found):
        assert f.logprob == pytest.approx(float(own[i]))
        for token, logprob in f.top:
            assert logprob == pytest.approx(float(true[i, token]), abs=1e-5)
