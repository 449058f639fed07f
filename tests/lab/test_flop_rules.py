"""The FLOP-rules lab: known models, the crossing, and verdicts."""

from __future__ import annotations

import pytest

from bagu.lab.core import Row, number
from bagu.lab.model import flop_rules


def test_the_rule_fits_the_shape_it_assumes() -> None:
    row = flop_rules.counted("GPT-3", flop_rules.gpt(12288, 4), 128)
    assert abs(number(row, "rule_error_of_blocks_percent")) < 0.1
    assert abs(number(row, flop_rules.RULE("blocks_and_head"))) < 0.2
    assert number(row, flop_rules.RULE("blocks")) < -5  # the head is large compared to four layers


def test_a_context_of_length_d_adds_a_twelfth() -> None:
    """6·L·d·T of attention besides 72·L·d² of weights."""
    no_head = flop_rules.gpt(768, 12, vocab_size=1)
    rows = [flop_rules.counted("gpt", no_head, T) for T in (128, 768, 2048)]
    assert number(rows[1], flop_rules.RULE("blocks")) == pytest.approx(100 * (12 / 13 - 1), abs=0.1)
    limit = flop_rules.limit(rows, "gpt")
    assert limit is not None
    assert limit / 768 == pytest.approx(12 / 9, rel=0.01)  # 1 / (1 + T/12d) = 0.9


def test_pytorch_counts_the_same_products() -> None:
    row = flop_rules.measured("gpt", flop_rules.gpt(64, 2, vocab_size=512), 64)
    assert abs(number(row, "weight_difference_percent")) < 0.5
    # the full square instead of half, and five products in the backward instead of four
    assert number(row, "attention_ratio") == pytest.approx(2 * 64 / 65 * 7 / 6, rel=1e-6)


def rows(size_error: float, *six_errors: float) -> list[Row]:
    made: list[Row] = [
        {
            "kind": "counted", "model": "m", "width": 100, "context_tokens": 100 * 2**i,
            "rule_error_of_blocks_percent": size_error,
        } | {flop_rules.RULE(rule): error for rule in flop_rules.RULES}
        for i, error in enumerate(six_errors)
    ]  # fmt: skip
    return [*made, {"kind": "measured", "weight_difference_percent": 0.0, "attention_ratio": 2.3}]


def test_the_verdict_follows_the_numbers() -> None:
    assert flop_rules.verdict(rows(1, -1, -5)).kind == "held"
    assert flop_rules.verdict(rows(1, -1, -50)).kind == "holds only where"
    assert flop_rules.verdict(rows(40, -1, -5)).kind == "holds only where"
    assert flop_rules.verdict(rows(40, -20, -50)).kind == "did not hold"


def test_the_crossing_is_in_the_sentence() -> None:
    # 6ND / count falls from 1 to 0.8 between 100 and 200 tokens, so count / 6ND is 1 / 0.9 at 144
    sentence = flop_rules.verdict(rows(1, 0, -20)).sentence_en
    assert "up to a context of 1.4·d to 1.4·d tokens" in sentence
