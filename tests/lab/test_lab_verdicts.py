"""Verdicts are computed: synthetic rows give each kind of verdict."""

from __future__ import annotations

import pytest
import torch

from bagu.errors import BaguError
from bagu.lab.core import Row, Verdict
from bagu.lab.gpu import fusion, launch_overhead
from bagu.lab.model import batchnorm_layernorm
from bagu.lab.numerics import numpy_lists, safe_softmax


def sum_times(n: int, *, loop: float, type_: float, layout: float) -> list[Row]:
    """Times in which each factor multiplies the speed by a given number, independent of the others."""
    rows: list[Row] = []
    for variant in numpy_lists.variants(1):
        corner = variant.corner or (None, None, None)
        fast = [a == b for a, b in zip(corner, numpy_lists.FAST, strict=True)]
        time = 100.0
        for gain, is_fast in zip((loop, type_, layout), fast, strict=True):
            time /= gain if is_fast else 1
        row: Row = {"n_elements": n, "variant": variant.name, "time_ns_per_element": time}
        rows.append(row | dict(zip(numpy_lists.FACTORS, corner, strict=True)))
    return rows


def test_numpy_lists_gains_are_the_factors() -> None:
    gains = numpy_lists.gains(sum_times(10, loop=4, type_=2, layout=3), 10)
    assert gains == pytest.approx({"loop": 4, "type": 2, "layout": 3})


def test_numpy_lists_flips() -> None:
    loop_wins = sum_times(10, loop=4, type_=2, layout=3)
    layout_wins = sum_times(1_000, loop=2, type_=2, layout=8)
    assert numpy_lists.verdict(loop_wins).kind == "did not hold"
    assert numpy_lists.verdict(layout_wins).kind == "held"
    both = numpy_lists.verdict(loop_wins + layout_wins)
    assert both.kind == "holds only where"
    assert "only at 1,000 elements" in both.sentence_en


def test_numpy_lists_variants_sum_the_same() -> None:
    variants = [variant for variant in numpy_lists.variants(100) if not variant.name.startswith("np.take")]
    totals = {variant.name: float(variant.call()) for variant in variants}  # type: ignore[arg-type]
    assert totals == pytest.approx(dict.fromkeys(totals, totals["sum(list), in order"]), rel=1e-4)


def softmax_row(dtype: str, std: float, broken: float, *, divided: bool = True) -> Row:
    shares: Row = {"naive_broken_percent": broken, "safe_broken_percent": 0.0}
    return {"dtype": dtype, "std": std, "divided": divided} | shares


def test_safe_softmax_flips() -> None:
    clean = [softmax_row("fp16", 1, 0), softmax_row("fp32", 1, 0), softmax_row("fp16", 1, 50, divided=False)]
    half = [*clean, softmax_row("fp16", 5, 10), softmax_row("fp16", 9, 10), softmax_row("fp32", 5, 0)]
    assert safe_softmax.verdict(clean).kind == "held"
    assert safe_softmax.verdict(half).kind == "holds only where"
    assert "5 in fp16" in safe_softmax.verdict(half).sentence_en
    assert safe_softmax.verdict([*half, softmax_row("fp32", 9, 1)]).kind == "did not hold"


def test_safe_softmax_distinguishes_overflow_and_underflow() -> None:
    over = safe_softmax.compare(torch.tensor([[1.0, 0.0], [1.0, 20.0]], dtype=torch.float16))
    under = safe_softmax.compare(torch.tensor([[-30.0, 0.0], [1.0, 2.0]], dtype=torch.float16))
    assert (over["overflow_percent"], over["underflow_percent"], over["naive_broken_percent"]) == (50, 0, 50)
    assert (under["overflow_percent"], under["underflow_percent"], under["naive_broken_percent"]) == (0, 50, 50)
    assert over["safe_broken_percent"] == under["safe_broken_percent"] == 0


def test_a_sum_that_overflows_without_nan_is_broken() -> None:
    # Each exp fits in fp16, their sum does not: every probability is 0.
    row = safe_softmax.compare(torch.full((2, 2), 11.0, dtype=torch.float16))
    assert row["naive_broken_percent"] == 50


def norm_row(B: int, padding: str, error: float, *, change: float = 0.0) -> Row:
    return {"batch_sequences": B, "padding": padding, "mean_error_sigma": error, "layer_norm_max_change": change}


def test_batchnorm_layernorm_flips() -> None:
    bad = [norm_row(1, "counted", 0.5), norm_row(64, "counted", 0.5), norm_row(1, "masked", 0.5)]
    assert batchnorm_layernorm.verdict([*bad, norm_row(64, "masked", 0.2)]).kind == "held"
    repaired = batchnorm_layernorm.verdict([*bad, norm_row(64, "masked", 0.02)])
    assert repaired.kind == "holds only where"
    assert "fewer than 64 sequences" in repaired.sentence_en
    assert batchnorm_layernorm.verdict([*bad, norm_row(64, "masked", 0.2, change=0.1)]).kind == "did not hold"
    harmless = [norm_row(1, "counted", 0.5), norm_row(64, "counted", 0.01), norm_row(1, "masked", 0.5)]
    assert batchnorm_layernorm.verdict(harmless).kind == "did not hold"


def fusion_rows(size: int, *, faster: float) -> list[Row]:
    common: Row = {"working_set_bytes": size, "last_level_cache_bytes": fusion.MIB}
    return [
        common | {"variant": "steps", "fused": False, "traffic_bytes": 1000, "time_us": 100.0},
        common | {"variant": "tiled", "fused": True, "traffic_bytes": 400, "time_us": 100.0 / faster},
        common | {"variant": "slow", "fused": True, "traffic_bytes": 400, "time_us": 1000.0},
    ]


def test_fusion_flips() -> None:
    near, far = fusion_rows(fusion.MIB, faster=2.4), fusion_rows(64 * fusion.MIB, faster=1.1)
    assert fusion.verdict(near).kind == "held"
    assert fusion.verdict(far).kind == "did not hold"
    assert fusion.verdict(near + far).kind == "holds only where"


def test_fusion_variants_compute_the_op() -> None:
    from bagu import ops

    b = fusion.Buffers.make(300, 1024, device="cpu", dtype=torch.float32)  # 300 rows: three tiles, the last one short
    y, s = ops.add_rms_norm(b.x, b.residual, b.w, fusion.EPS)
    torch.testing.assert_close(fusion.steps_anew(b.x, b.residual, b.w), (y, s))
    for way in (fusion.steps, lambda b: fusion.tiled(list(fusion.tiles(b))), lambda b: fusion.into(*b[:5])):
        b.s.fill_(torch.nan)
        b.y.fill_(torch.nan)
        way(b)
        torch.testing.assert_close((b.y, b.s), (y, s))


def test_a_verdict_is_one_of_four_and_an_open_one_says_what_it_takes() -> None:
    with pytest.raises(BaguError, match="maybe"):
        Verdict(kind="maybe", sentence_en="", sentence_zh="")  # type: ignore[arg-type]
    with pytest.raises(BaguError, match="what it would take"):
        Verdict(kind="not decided", sentence_en="?", sentence_zh="？")


def launch_row(size: int, *, host: float, kernel: float, call: float) -> Row:
    return {"way": "bagu.ops", "size_bytes": size, "host_us": host, "kernel_us": kernel, "call_us": call}


def test_launch_overhead_flips() -> None:
    small, large = (
        launch_row(1 << 20, host=20.0, kernel=3.0, call=21.0),
        launch_row(1 << 28, host=20.0, kernel=150.0, call=155.0),
    )
    neither = launch_row(1 << 24, host=20.0, kernel=15.0, call=35.0)  # host and kernel one after the other
    assert launch_overhead.verdict([small, large]).kind == "held"
    assert "waits up to 1 MiB" in launch_overhead.verdict([small, large]).sentence_en
    assert "at no size" in launch_overhead.verdict([large]).sentence_en
    assert launch_overhead.verdict([neither]).kind == "did not hold"
    assert launch_overhead.verdict([small, neither]).kind == "holds only where"


def test_launch_overhead_draws() -> None:
    (panel,) = launch_overhead.plot([launch_row(1 << i, host=20.0, kernel=i, call=21.0) for i in range(1, 20, 6)])
    assert len(panel.marks) == 3
