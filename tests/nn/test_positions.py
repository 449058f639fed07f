"""Position encodings: each formula against its paper, and its invariants."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import make, packed, small

from bagu import ops
from bagu.nn.config import Rope, Sinusoidal, T5Relative, YarnScaling
from bagu.nn.position_choices import Llama3Scaling
from bagu.nn.positions import alibi_slopes, make_encoding, rope_speeds, sinusoids, t5_bucket


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("scaling", [None, Llama3Scaling(factor=8.0, original_max_len=64)], ids=["plain", "llama3"])
@settings(max_examples=20)
@given(m=st.integers(0, 200), n=st.integers(0, 200), shift=st.integers(0, 55))
def test_rope_depends_on_the_distance_only(
    layout: str, scaling: Llama3Scaling | None, m: int, n: int, shift: int
) -> None:
    """<R_m q, R_n k> = <R_(m+s) q, R_(n+s) k>."""
    config = small(max_len=256, positions=Rope(layout=layout, scaling=scaling))
    encoding = make_encoding(config)
    stream = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, generator=stream, dtype=torch.float64)

    def score(a: int, b: int) -> float:
        signals = encoding.signals(torch.tensor([a, b]), 1)
        assert signals.cos is not None and signals.sin is not None
        turned = ops.rope(torch.cat((q, k)), signals.cos, signals.sin, layout=layout)
        return float((turned[0] * turned[1]).sum())

    assert score(m, n) == pytest.approx(score(m + shift, n + shift), abs=1e-5)  # the tables are fp32


def test_a_rope_model_is_invariant_to_a_position_offset() -> None:
    model = make(small(), torch.float64)
    ids, positions, cu_seqlens, max_len = packed([9])
    torch.testing.assert_close(
        model(ids, positions, cu_seqlens, max_len).hidden,
        model(ids, positions + 17, cu_seqlens, max_len).hidden,
        rtol=1e-5, atol=1e-5,
    )  # fmt: skip


def test_frequencies_match_the_paper() -> None:
    speeds, size = rope_speeds(Rope(base=10000.0), 8)
    assert speeds.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    assert size == 1.0


def test_llama3_scaling() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_len=8192)
    plain, _ = rope_speeds(Rope(base=500000.0), 128)
    scaled, _ = rope_speeds(Rope(base=500000.0, scaling=scaling), 128)
    turns = 8192 * plain / (2 * math.pi)
    ratio = plain / scaled
    assert torch.equal(ratio[turns > 4], torch.ones_like(ratio[turns > 4]))
    torch.testing.assert_close(ratio[turns < 1], torch.full_like(ratio[turns < 1], 8.0))
    between = ratio[(turns >= 1) & (turns <= 4)]
    assert len(between) > 3 and (between.diff() > 0).all()


def test_yarn_scaling() -> None:
    scaling = YarnScaling(factor=4.0, original_max_len=4096)
    plain, _ = rope_speeds(Rope(), 128)
    scaled, size = rope_speeds(Rope(scaling=scaling), 128)
    turns = 4096 * plain / (2 * math.pi)
    ratio = plain / scaled
    assert ratio[turns > 33].max() < 1.05 and ratio[turns < 1].min() == pytest.approx(4.0)
    assert (ratio.diff() >= -1e-12).all()
    assert size == pytest.approx(0.1 * math.log(4.0) + 1)
    assert (
        rope_speeds(Rope(scaling=YarnScaling(factor=4.0, original_max_len=4096, attention_factor=2.0)), 128)[1] == 2.0
    )
    deepseek = YarnScaling(factor=40.0, original_max_len=4096, mscale=1.0, mscale_all_dim=1.0)
    assert rope_speeds(Rope(scaling=deepseek), 64)[1] == 1.0


def test_sinusoids_match_the_paper() -> None:
    table = sinusoids(50, 16)
    for p, i in [(0, 0), (3, 1), (49, 5)]:
        angle = p / 10000 ** (2 * i / 16)
        assert table[p, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
        assert table[p, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


def test_sinusoidal_positions_reach_the_embedding() -> None:
    encoding = make_encoding(small(positions=Sinusoidal()))
    x = torch.ones(3, 32)
    expected = math.sqrt(32) + sinusoids(32, 32)[[4, 0, 9]]
    torch.testing.assert_close(encoding.embed(x, torch.tensor([4, 0, 9])), expected)


def test_alibi_slopes_match_the_paper() -> None:
    assert alibi_slopes(8) == pytest.approx([2.0**-i for i in range(1, 9)])
    assert alibi_slopes(1) == pytest.approx([2.0**-8])
    twelve = alibi_slopes(12)  # the slopes of 8 heads, then the 1st, 3rd, 5th, 7th of 16
    assert twelve == pytest.approx([*alibi_slopes(8), *alibi_slopes(16)[0:8:2]])


@given(heads=st.integers(1, 200))
def test_every_head_has_a_different_slope(heads: int) -> None:
    slopes = alibi_slopes(heads)
    assert len(set(slopes)) == heads and all(0 < s < 1 for s in slopes)


@pytest.mark.parametrize("causal", [True, False])
def test_t5_buckets_match_transformers(causal: bool) -> None:
    attention = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    distance = torch.arange(-300, 301)
    theirs = attention._relative_position_bucket(distance, bidirectional=not causal, num_buckets=32, max_distance=128)
    assert torch.equal(t5_bucket(distance, T5Relative(), causal=causal), theirs)


@given(near=st.integers(0, 400), causal=st.booleans())
def test_distances_past_the_longest_share_a_bucket(near: int, causal: bool) -> None:
    """The table of biases can therefore end there."""
    config = T5Relative(buckets=16, max_distance=40)
    ends = t5_bucket(torch.tensor([-40 - near, -40, 40, 40 + near]), config, causal=causal).tolist()
    assert ends[0] == ends[1] and ends[2] == ends[3]
