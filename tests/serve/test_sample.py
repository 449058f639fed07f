"""Sampling: the same tokens for a seed in any batch, penalties by their formulas, random numbers, logprobs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from row_sampling import Choice, sample_rows

from bagu.nn.sample import uniform
from bagu.ops.sample.torch_backend import argmax
from bagu.serve.changes import Row, changed, changes
from bagu.serve.request import Sampling
from bagu.serve.sample import top_logprobs
from bagu.serve.slots import SPARE, Slots

V = 40


def row(sampling: Sampling, *, seed: int = 0, output: tuple[int, ...] = (), prompt: tuple[int, ...] = (1,)) -> Choice:
    stops = frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else (V - 1,))))
    return Choice(sampling, seed, 0, (*prompt, *output), len(prompt), stops)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def adjusted(x: torch.Tensor, given: Choice) -> torch.Tensor:
    """x[1, V] with bias, penalties and masked stop tokens."""
    found = changes([Row(given.sampling, given.tokens, given.num_prompt, given.stops)], V)
    if found is None:
        return x
    ids, terms = torch.from_numpy(found.ids), torch.from_numpy(found.terms)
    used = ids[0] >= 0
    return x.clone().index_copy_(1, ids[0, used], changed(x, ids, terms)[:, used])


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


@settings(max_examples=60)
@given(st.lists(SAMPLINGS, min_size=1, max_size=5))
def test_a_row_samples_the_same_alone_and_in_any_batch(samplings: list[Sampling]) -> None:
    x = logits(len(samplings))
    rows = [row(s, seed=i, output=(3, 3, 7)) for i, s in enumerate(samplings)]
    together = sample_rows(x, rows).tolist()
    assert together == [int(sample_rows(x[i : i + 1], [r])) for i, r in enumerate(rows)]
    assert torch.equal(x, logits(len(samplings)))  # unchanged: the logprobs still need them


def test_samples_follow_the_probabilities() -> None:
    x = torch.tensor([[0.0, 1.0, 2.0]]).expand(4000, 3)
    rows = [Choice(Sampling(temperature=0.5), i, 0, (0,), 1) for i in range(4000)]
    found = torch.bincount(sample_rows(x, rows), minlength=3) / 4000
    want = (x[0] / 0.5).softmax(-1)
    torch.testing.assert_close(found, want, atol=0.03, rtol=0)  # 4 sigma of 4000 draws is 0.03


def test_penalties_bias_and_masked_stop_tokens_match_their_formulas() -> None:
    x = logits(1)
    penalties = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    s = Sampling(max_tokens=9, logit_bias={5: 4.0}, min_tokens=4, stop_token_ids=(8,), **penalties)
    got = adjusted(x, row(s, prompt=(1, 2), output=(2, 2, 6)))[0]
    want = x[0].clone()
    for t in (1, 2, 6):
        want[t] = want[t] / 2 if want[t] > 0 else want[t] * 2
    want[2] -= 0.5 + 0.25 * 2
    want[6] -= 0.5 + 0.25
    want[5] += 4
    want[[8, V - 1]] = -torch.inf
    torch.testing.assert_close(got, want)
    done = adjusted(x, row(s, prompt=(1, 2), output=(2, 2, 6, 6)))[0]
    assert done[8] > -torch.inf


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
    assert sample_rows(x, [row(sampling)]).tolist() == [int(x.argmax())]


def test_no_token_is_masked_if_all_would_end_the_output() -> None:
    every = Sampling(max_tokens=8, min_tokens=3, stop_token_ids=tuple(range(V)), temperature=1.0)
    assert torch.equal(adjusted(logits(1), row(every)), logits(1))


@given(st.integers(), st.integers(0, 5), st.integers(0, 9), st.integers(0, 1000))
def test_the_random_number_is_a_function_of_seed_choice_and_position(
    seed: int, choice: int, n: int, prompt: int
) -> None:
    slots = Slots(V)
    at = np.array([slots.add(Sampling(), seed, c, prompt) for c in (choice, choice + 1)])
    packed = slots.parameters(at, np.array([prompt + n, prompt + n + 1]))
    *_, u = packed.unpack(torch.from_numpy(packed.packed))
    assert u.tolist() == [np.float32(uniform(seed, choice, n)), np.float32(uniform(seed, choice + 1, n + 1))]


def test_slots_are_reused_and_grow() -> None:
    slots = Slots(V)
    first = [slots.add(Sampling(temperature=0.5, top_k=k), 0, 0, 1) for k in range(1, 4)]
    slots.remove(first[1:2])
    again = slots.add(Sampling(temperature=0.25, top_p=0.5), 0, 0, 1)
    more = [slots.add(Sampling(temperature=0.0, top_k=1000), i, 0, 1) for i in range(200)]
    assert again == first[1] and len({SPARE, *first, *more}) == 204
    found = slots.parameters(np.array([first[0], again, first[2], more[-1], SPARE]), np.ones(5, dtype=np.int64))
    temperature, top_k, top_p, *_ = found.unpack(torch.from_numpy(found.packed))
    assert temperature.tolist() == [0.5, 0.25, 0.5, 0.0, 0.0]
    assert top_k.tolist() == [1, V, 3, V, V]
    assert top_p.tolist() == [1.0, 0.5, 1.0, 1.0, 1.0]
    assert slots.greedy(np.array([SPARE, more[0]])) and not slots.greedy(np.array([SPARE, again]))


def test_parameters_begin_at_multiples_of_16_bytes() -> None:
    slots = Slots(V)
    for count in (1, 5, 8):
        found = slots.parameters(np.array([slots.add(Sampling(), 0, 0, 1)] * count), np.ones(count, dtype=np.int64))
        on_host = torch.from_numpy(found.packed)
        assert all((t.data_ptr() - on_host.data_ptr()) % 16 == 0 for t in found.unpack(on_host))


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
    found = top_logprobs(x, own, targets, [2, 0, 4]).details()
    assert [len(f.top) for f in found] == [2, 0, 4]
    for i, f in enumerate(found):
        assert f.logprob == pytest.approx(float(own[i]))
        for token, logprob in f.top:
            assert logprob == pytest.approx(float(true[i, token]), abs=1e-5)
