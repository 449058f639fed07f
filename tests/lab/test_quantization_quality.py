"""The lab on quantization quality: real engines in every format, and verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from bagu.lab.core import Row
from bagu.lab.numerics import quantization_quality as lab


def check_rows(rows: Sequence[Row]) -> None:
    """Of a quick run (test_lab_run.py): every format is measured on the same items."""
    assert [r["format"] for r in rows] == [f.name for f in lab.formats()]
    assert len({r["items"] for r in rows}) == 1
    costs = {str(r["format"]): abs(lab.cost(r, rows)) for r in rows}
    assert costs.pop("fp32") == 0.0
    assert all(cost > 0 for cost in costs.values()), "every format changes the weights"
    assert costs["bf16"] < costs["int4"] and costs["int8"] < costs["int4"]


def row(name: str, bits: float, loss: float) -> Row:
    return {"format": name, "weight_bits": bits, "loss_bits_per_byte": loss, "continue4_percent": 50.0}


def test_the_verdict_follows_the_costs() -> None:
    exact = row("fp32", 32, 1.5)
    assert lab.verdict([exact, row("int8", 8.1, 1.501), row("int4", 4.25, 1.55)]).kind == "held"
    cheap = lab.verdict([exact, row("int8", 8.1, 1.501), row("int4", 4.25, 1.505)])
    assert cheap.kind == "holds only where" and "int4 +0.0050" in cheap.sentence_en
    assert lab.verdict([exact, row("fp8", 8.1, 1.6), row("int4", 4.25, 1.55)]).kind == "did not hold"
