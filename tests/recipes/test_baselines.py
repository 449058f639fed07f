from __future__ import annotations

import random

import pytest

from bagu.recipes.baselines import compressors, judge_code


def test_priming_pays_for_text_that_was_seen_and_not_for_noise() -> None:
    rng = random.Random(0)
    noise = lambda n: "".join(rng.choice("abcdefghijklmnop") for _ in range(n))  # noqa: E731
    seen = noise(20_000)
    known = compressors([seen], [seen[5_000:15_000]])
    assert known.primed_xz_bits_per_byte < 0.1 < known.xz_bits_per_byte
    fresh = compressors([seen], [noise(10_000)])
    assert fresh.primed_xz_bits_per_byte == pytest.approx(fresh.xz_bits_per_byte, rel=0.05)
    assert fresh.gzip_bits_per_byte >= 4.0  # sixteen letters carry four bits
    assert (fresh.held_out_bytes, fresh.priming_bytes) == (10_000, 20_000)


def test_no_held_out_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="held-out"):
        compressors(["text"], [])


def test_samples_are_judged_by_parser_length_and_variety() -> None:
    good = judge_code(["def f(x):\n    return x + 1", "y = [i for i in range(3) if i]"])
    assert (good.parse_percent, good.define_percent) == (100, 50)
    bad = judge_code(["def f(:", "", "# only a comment", "a b c d " * 20])
    assert bad.parse_percent == 0 and bad.distinct_4gram_percent < 10
    assert judge_code([]).parse_percent == 0
