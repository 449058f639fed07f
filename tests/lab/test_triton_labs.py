"""Planted rows and small parts of the labs about what Triton chooses and what compiling costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bagu.lab.core import Row
from bagu.lab.gpu import jit_cost, triton_auto
from bagu.lab.parts.jit_calls import CHANGES, FIRST


def code(access: str, load_bits: int, shared_bytes: int, barriers: int, crosses_warps: bool = True) -> Row:
    """A compiled kernel of triton_auto."""
    found = {"load_bits": load_bits, "shared_bytes": shared_bytes, "barriers": barriers}
    return {"case": f"{access} {load_bits}", "access": access, "crosses_warps": crosses_warps, **found}


def calls(cold_ms: float, disk_ms: float, later_ms: float, made: str) -> list[Row]:
    """The calls of two processes of jit_cost; what changed calls are made by."""
    rows: list[Row] = []
    for process, first_ms, by in ((jit_cost.COLD, cold_ms, made), (jit_cost.DISK, disk_ms, "disk")):
        parts = {**dict.fromkeys(jit_cost.PARTS, 0.0), "front_ms": first_ms}
        common: Row = {"process": process, "kernel": "rms_norm"}
        rows.append({**common, "step": FIRST, "made": "compiler", "time_ms": first_ms, **parts})
        rows += [{**common, "step": step, "made": by, "time_ms": 90.0} for step in CHANGES]
        rows.append({**common, "step": jit_cost.LATER, "made": "memory", "time_ms": later_ms})
    return rows


PLANTED: dict[str, tuple[list[Row], list[Row]]] = {
    "jit_cost": (calls(3000.0, 100.0, 0.01, "memory"), calls(100.0, 90.0, 80.0, "compiler")),
    "triton_auto": (
        [code("aligned", 128, 16, 3), code("uneven", 128, 16, 3), code("strided", 128, 0, 0, crosses_warps=False)],
        [code("aligned", 32, 16, 0), code("uneven", 32, 0, 0), code("strided", 32, 0, 0, crosses_warps=False)],
    ),
}


def test_loads_are_wide_only_where_addresses_are_aligned() -> None:
    rows = [code("aligned", 128, 16, 3), code("uneven", 32, 16, 3), code("uneven", 16, 16, 3)]
    verdict = triton_auto.verdict(rows)
    assert verdict.kind == "holds only where"
    assert "1 of 1 with neighbouring" in verdict.sentence_en and "16 bits: uneven 16; 32 bits" in verdict.sentence_en


@pytest.mark.parametrize(
    ("instruction", "bits"),
    [("LDG.E", 32), ("LDG.E.128.CONSTANT", 128), ("LDGSTS.E.BYPASS.128", 128), ("LDG.E.U16", 16), ("STG.E.64", 64)],
)
def test_the_width_of_an_instruction(instruction: str, bits: int) -> None:
    assert triton_auto.width(instruction) == bits


def compiled(cache_hit: bool) -> dict[str, Any]:
    stages = [("ttir", 1000), ("ptx", 2000), ("cubin", 4000)]
    return {"cache_hit": cache_hit, "times": SimpleNamespace(ir_initialization=500, lowering_stages=stages)}


def test_the_parts_of_a_call_add_up() -> None:
    row = jit_cost.split(10.0, [compiled(False)], {"import_ms": 20.0, "hash_ms": 30.0})
    assert row["made"] == "compiler" and row["time_ms"] == 60.0
    assert [row[part] for part in jit_cost.PARTS] == [20.0, 30.0, 0.5, 3.0, 4.0, 2.5]
    assert jit_cost.split(1.0, [compiled(True)], {})["made"] == "disk"
    assert jit_cost.split(1.0, [], {})["made"] == "memory"


def test_calls_until_a_kernel_has_paid() -> None:
    paid: Row = {"process": jit_cost.COLD, "kernel": "rms_norm", "step": jit_cost.PAYS}
    rows = [*calls(1000.0, 500.0, 0.01, "memory"), {**paid, "eager_us": 60.0, "kernel_us": 20.0}]
    assert "after 25,000 calls" in jit_cost.verdict(rows).sentence_en
    rows[-1]["kernel_us"] = 70.0
    assert "never" in jit_cost.verdict(rows).sentence_en
