from __future__ import annotations

import random

import pytest

from bagu.recipes.baselines import compressors


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
