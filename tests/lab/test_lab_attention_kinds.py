"""The attention lab: equal parameters, correct cache sizes, and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest

from bagu.errors import BaguError
from bagu.lab.core import Row
from bagu.lab.model import attention_kinds as lab
from bagu.nn import count

CACHE = {"MHA": 512, "GQA": 128, "MQA": 64, "MLA": 144, "fewer heads": 128, "itself only": 0}


def made_up(percents: Mapping[str, float], *, noise: float = 0.1) -> list[Row]:
    """Three seeds of each kind, with losses this many percent above MHA."""
    above = dict.fromkeys(CACHE, 0.0) | {"itself only": 15.0} | dict(percents)
    return [
        {
            "part": "loss", "kind": name, "parameters": 1000, "kv_bytes_per_token": CACHE[name], "seed": seed,
            "steps": 9,
            "val_loss_nats": (2 + 0.1 * seed) * (1 + (percent + noise * (seed - 2) * (name != "MHA")) / 100),
        }
        for (name, percent), seed in product(above.items(), (1, 2, 3))
    ]  # fmt: skip


def test_the_verdict_flips() -> None:
    assert lab.verdict(made_up({})).kind == "held"
    assert lab.verdict(made_up({"MLA": -5.0})).kind == "held"
    some = lab.verdict(made_up({"MQA": 3.0, "MLA": 0.5}))
    assert some.kind == "holds only where"
    assert "MQA with 12 % of the cache +3.0 ± 0.2 % (worse)" in some.sentence_en
    assert "MLA with 28 % of the cache +0.5 ± 0.2 % (no worse)" in some.sentence_en
    assert lab.verdict(made_up({"GQA": 3.0, "MQA": 3.0, "MLA": 3.0})).kind == "did not hold"


def test_the_control_is_reported() -> None:
    assert "does not need the heads" in lab.verdict(made_up({})).sentence_en
    assert "does not need the heads" not in lab.verdict(made_up({"fewer heads": 4.0})).sentence_en


def test_inconclusive_seeds_decide_nothing() -> None:
    noisy = lab.verdict(made_up({}, noise=2.0))
    assert noisy.kind == "not decided" and "GQA, MQA, MLA" in noisy.takes_en
    assert noisy.sentence_en.count("(open)") == 3


def test_a_row_without_a_loss_is_named() -> None:
    rows = made_up({})
    rows[0]["val_loss_nats"] = None
    with pytest.raises(BaguError, match="val_loss_nats is None"):
        lab.verdict(rows)


def test_parameters_are_equal_and_cache_sizes_match_allocation() -> None:
    rows = [lab.facts(name, config) for name, config in lab.kinds(lab.SMALL).items()]
    for row in rows:
        assert row["parameters"] == pytest.approx(rows[0]["parameters"], rel=0.002)
        assert row["kv_bytes_per_token"] == row["allocated_kv_bytes_per_token"] == CACHE[str(row["kind"])]


def test_the_large_model_has_the_published_size() -> None:
    """Llama 3 8B has 8.03 billion parameters and 8 KV heads."""
    config = replace(lab.LARGE, num_kv_heads=lab.LARGE.num_heads // 4)
    assert count.parameters(config).total == 8_030_261_248
