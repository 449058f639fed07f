"""The lab on quantization error: rounding is that of the ops, the predictions hold, and verdicts follow."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from bagu import ops
from bagu.lab.core import Row
from bagu.lab.numerics import quantization_error as lab


def check_rows(rows: Sequence[Row]) -> None:
    """Of a quick run (test_lab_run.py): every format and sharing, on all weights."""
    assert {(r["format"], r["scale_per"]) for r in rows} == {(f, s) for f in lab.FORMATS for s in lab.SHARING}
    assert lab.kinds(rows) == ["Gaussian", "with outliers", "new model"]
    assert lab.deviation(rows) < 0.1
    assert all(0 < float(r["error_percent"]) < 100 for r in rows)  # type: ignore[arg-type]


def weight() -> torch.Tensor:
    return lab.gaussian((24, 256), 3, outliers=True)


def test_4_bits_in_groups_are_those_of_the_op() -> None:
    w = weight().float()
    assert torch.equal(lab.rounded(w, "int4", "group"), ops.dequantize_int4(*ops.quantize_int4(w)).double())


@pytest.mark.parametrize("sharing", lab.SHARING)
def test_8_bit_integers_are_rounded_to_the_nearest_step(sharing: str) -> None:
    w = weight().float()
    rows = w.reshape(-1, lab.shared_by(sharing, w.shape))
    step = rows.abs().amax(1, keepdim=True).double() / 127
    error = (rows - lab.rounded(w, "int8", sharing).reshape(rows.shape)).abs()
    assert bool((error <= step / 2 * (1 + 2**-20)).all())  # the scale is rounded to fp32


def test_fp8_rounds_relative_to_the_value() -> None:
    w = weight().float()
    error = (w - lab.rounded(w, "fp8", "row")).abs()
    largest = w.abs().amax(1, keepdim=True)
    normal = w.abs() > largest * 2**-6 / 448  # smaller ones are subnormal
    assert bool((error[normal] <= w.abs()[normal] * 2**-4 * (1 + 2**-20)).all())


def test_bits_include_the_scales() -> None:
    shape = torch.Size([16, 256])
    assert [lab.weight_bits("int4", s, shape) for s in lab.SHARING] == [4 + 32 / 4096, 4 + 32 / 256, 4.25]


def rows_of(**errors: tuple[float, float, float]) -> list[Row]:
    """Rows of one kind of weights: errors by format, with a scale per tensor, row and group."""
    return [
        {"weights": "Gaussian", "sample": i, "format": form, "scale_per": sharing, "weight_bits": 8.0,
         "error_percent": error * (1 + 0.001 * i), "output_error_percent": error * (1 + 0.001 * i),
         "predicted_error_percent": error}
        for form, found in errors.items() for sharing, error in zip(lab.SHARING, found, strict=True) for i in range(3)
    ]  # fmt: skip


def test_the_verdict_follows_the_errors() -> None:
    falling, flat = (3.0, 2.0, 1.0), (2.0, 2.0, 2.0)
    assert lab.verdict(rows_of(int8=falling, int4=falling, fp8=falling)).kind == "held"
    some = lab.verdict(rows_of(int8=falling, int4=falling, fp8=flat))
    assert some.kind == "holds only where" and "fp8 0 of 2" in some.sentence_en
    assert lab.verdict(rows_of(int8=flat, int4=flat, fp8=flat)).kind == "did not hold"
