"""The lab of reward hacking: its functions, real runs on both rewards, verdicts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from bagu.data.stdlib import parsed
from bagu.eval.function_checks import CHECKS, checks_passed
from bagu.lab.core import Row
from bagu.lab.parts.small_functions import NAMES, function_text, prompt_text
from bagu.lab.post_train import reward_hacking as lab


def test_every_small_function_parses_and_some_fail_the_strict_checks() -> None:
    draw = random.Random(0)
    asked = [(name, function_text(name, draw)) for name in NAMES for _ in range(40)]
    assert all(parsed(prompt_text(name) + text) is not None for name, text in asked)
    passed = [checks_passed(text, {"name": name}) for name, text in asked]
    assert min(passed) >= CHECKS.index("statements") and 0.5 < passed.count(len(CHECKS)) / len(passed) < 0.8


def check_rows(rows: Sequence[Row]) -> None:
    """Of a quick run (test_lab_run.py): judges every policy by both rewards."""
    assert len(rows) == 2 * 2 * 2 * (2 + 2)  # starts, seeds, rewards; two rollouts, before, after
    for row in rows:
        assert 0 <= row["strict_percent"] <= row["loose_percent"] <= 100  # type: ignore[operator]
    before = [[r for r in rows if r["part"] == "before" and r["reward"] == reward] for reward in lab.REWARDS]
    same = ("start", "seed", "loose_percent", "strict_percent", "characters")
    assert [[r[k] for k in same] for r in before[0]] == [[r[k] for k in same] for r in before[1]]


def ends(start: str, reward: str, *, loose: float, strict: float, scatter: float = 1.0) -> list[Row]:
    """Changes of the two scores, which scatter over three seeds."""
    return [
        {
            "part": part, "start": start, "reward": reward, "seed": seed, "round": 9,
            "loose_percent": 50.0 + after * (loose + scatter * seed),
            "strict_percent": 50.0 + after * (strict + scatter * seed),
            "different_percent": 90.0 - 30.0 * after, "characters": 60.0 - 25.0 * after,
        }
        for seed in (-1, 0, 1)
        for part, after in (("before", 0), ("after", 1))
    ]  # fmt: skip


def test_a_change_is_paired_by_seed() -> None:
    rows = ends("weak", "loose", loose=30.0, strict=-20.0)
    assert lab.change(rows, "weak", "loose", "strict") == pytest.approx((-20.0, 4.303 / 3**0.5))
    assert lab.change(rows, "weak", "loose", "characters") == (-25.0, 0.0)


def test_the_loose_reward_is_hacked_only_if_it_rises_and_the_strict_score_falls() -> None:
    other = ends("weak", "strict", loose=0.0, strict=30.0) + ends("strong", "strict", loose=0.0, strict=30.0)
    hacked = {start: ends(start, "loose", loose=30.0, strict=-20.0) for start in lab.STARTS}
    honest = ends("weak", "loose", loose=30.0, strict=20.0)
    unclear = ends("weak", "loose", loose=30.0, strict=-20.0, scatter=20.0)
    assert lab.verdict([*hacked["weak"], *hacked["strong"], *other]).kind == "held"
    some = lab.verdict([*honest, *hacked["strong"], *other])
    assert some.kind == "holds only where" and "the strict score falls: strong." in some.sentence_en
    assert "-25 ± 0 characters" in some.sentence_en
    for rows in (honest, unclear, ends("weak", "loose", loose=0.0, strict=-20.0)):
        found = lab.verdict([*rows, *ends("weak", "strict", loose=0.0, strict=30.0)])
        assert found.kind == "did not hold" and "falls: none." in found.sentence_en
