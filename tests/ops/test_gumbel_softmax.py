"""The noise of gumbel_softmax: the right generator, the right distribution, the same sample everywhere."""

from __future__ import annotations

import math

import pytest
import torch

from bagu.errors import ArgumentError
from bagu.ops.gumbel_softmax import gumbel_softmax
from bagu.ops.gumbel_softmax.noise import gumbel, philox, words

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BACKENDS = ("torch", "triton")
LAST = 2**32 - 1

# Published with the algorithm (Random123, kat_vectors): counter, key, result of philox4x32 at 10 rounds.
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([LAST] * 4, [LAST] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize("counter, key, want", KNOWN)
def test_philox_gives_the_published_words(counter: list[int], key: list[int], want: list[int]) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor(v) for v in counter + key)
    assert [int(word) for word in philox((c0, c1, c2, c3), (k0, k1))] == want


def test_a_word_comes_from_seed_row_and_column_alone() -> None:
    whole = words(torch.empty(6, 11), 7)
    assert torch.equal(words(torch.empty(2, 3, 11), 7).flatten(0, 1), whole)  # rows are counted over leading dims
    assert torch.equal(words(torch.empty(6, 5), 7), whole[:, :5])
    assert torch.equal(words(torch.empty(11), 7), whole[0])
    assert whole.unique().numel() == whole.numel()


def test_noise_is_exact_in_both_tails() -> None:
    """In fp32 too, where u itself would round to 0 or to 1 and the noise to infinity."""
    word = torch.tensor([0, 1, 2, 1000, 2**24, 2**31 - 1, 2**31, LAST - 1000, LAST - 1, LAST])
    want = [-math.log(-math.log1p(-(w + 0.5) / 2**32)) for w in word.tolist()]
    torch.testing.assert_close(gumbel(word, torch.float64), torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=0)
    torch.testing.assert_close(gumbel(word, torch.float32), torch.tensor(want), rtol=2e-7, atol=2e-7)


def test_noise_has_the_moments_of_a_gumbel() -> None:
    n = 1 << 18
    g = gumbel(words(torch.empty(64, n // 64), 123), torch.float64).flatten()
    variance = math.pi**2 / 6
    assert abs(float(g.mean()) - 0.5772156649) < 5 * math.sqrt(variance / n)  # the Euler-Mascheroni constant
    assert abs(float(g.var()) - variance) < 5 * variance * math.sqrt(4.4 / n)  # its kurtosis is 5.4
    uniform = (-(-g).exp()).exp().sort().values  # the distribution function: uniform if the noise is Gumbel
    steps = (torch.arange(n) + 0.5) / n
    assert float((uniform - steps).abs().max()) < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov, 0.1 %
    lag = torch.corrcoef(torch.stack([g[:-1], g[1:]]))[0, 1]
    assert abs(float(lag)) < 5 / math.sqrt(n)  # neighbours, of one Philox call or of two, are independent


def test_hard_samples_occur_as_often_as_their_probability() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -torch.inf])
    n = 40_000
    drawn = gumbel_softmax(logits.expand(n, 5), hard=True, seed=5, backend="torch")
    assert torch.equal(drawn.sum(-1), torch.ones(n))
    p = torch.softmax(logits, -1)
    error = (drawn.mean(0) - p).abs()
    assert (error <= 4 * (p * (1 - p) / n).sqrt()).all()  # and the last exactly never


@pytest.mark.parametrize("seed", [0, 1, 2**31 + 5, 2**32, 2**62 + 3, 2**63 - 1])
@pytest.mark.parametrize("hard", [False, True])
def test_a_seed_is_one_sample_on_every_backend(seed: int, hard: bool) -> None:
    logits = torch.randn(3, 37, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    a, b = (gumbel_softmax(logits, 0.8, hard, seed, backend=name) for name in BACKENDS)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_different_seeds_are_different_samples(backend: str) -> None:
    logits = torch.zeros(4, 16, device=DEVICE)
    seeds = (0, 1, 2, 2**32, 2**32 + 1, 2**63 - 1)  # some differ in the upper half of the key alone
    samples = [gumbel_softmax(logits, seed=s, backend=backend) for s in seeds]
    for i, a in enumerate(samples):
        assert all(not torch.allclose(a, b) for b in samples[:i])


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_lie_apart(backend: str) -> None:
    wide = torch.randn(4, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    y = gumbel_softmax(wide[:, :15], seed=2, backend=backend)
    want = gumbel_softmax(wide[:, :15].contiguous(), seed=2, backend=backend)
    torch.testing.assert_close(y, want, rtol=0, atol=0)
    a, b = (torch.autograd.grad(out.square().sum(), wide)[0] for out in (y, want))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_logits_give_empty_samples(backend: str) -> None:
    for shape in ((0, 5), (3, 0), (0,)):
        logits = torch.empty(shape, device=DEVICE, requires_grad=True)
        y = gumbel_softmax(logits, hard=True, backend=backend)
        assert y.shape == shape
        y.sum().backward()


def test_values_out_of_range_are_refused() -> None:
    logits = torch.zeros(2, 3)
    for bad in (
        {"tau": 0.0},
        {"tau": -1.0},
        {"tau": float("nan")},
        {"tau": float("inf")},
        {"tau": 10**400},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 1.5},
    ):
        with pytest.raises(ArgumentError, match=next(iter(bad))):
            gumbel_softmax(logits, **bad)  # type: ignore[arg-type]
