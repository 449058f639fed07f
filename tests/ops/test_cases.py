"""What the cases of a spec must exercise together."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import OpSpec, Streams
from tests.ops.points import small

SCALARS = [pytest.param(s, a.name, id=f"{s.name}-{a.name}") for s in SPECS.values() for a in s.sig.scalars]


def far(value: Any, usual: Any) -> bool:
    """Whether a result would show it if `usual` stood in for `value`."""
    if any(v is None or isinstance(v, bool | str) for v in (value, usual)):
        return value != usual
    return abs(value - usual) >= 0.3 * max(abs(value), abs(usual)) > 0


@pytest.mark.parametrize("spec, scalar", SCALARS)
def test_every_scalar_argument_takes_a_value_far_from_the_usual_one(spec: OpSpec, scalar: str) -> None:
    """An op that ignores it would pass otherwise."""
    values = [spec.inputs(case, Streams(spec.name, case.name))[scalar] for case in small(spec)]
    usual = statistics.mode(values)
    assert any(far(value, usual) for value in values), f"always about {usual}"


@pytest.mark.parametrize("spec", [pytest.param(s, id=s.name) for s in SPECS.values()])
def test_the_names_of_the_cases_of_an_op_differ(spec: OpSpec) -> None:
    names = [case.name for case in spec.cases]
    assert len(names) == len(set(names))


COLUMNS = {  # op -> the parameter of its cases that is the length of a row
    **dict.fromkeys(("add_rms_norm", "layer_norm", "rms_norm", "scale_norm", "geglu", "swiglu"), "N"),
    **dict.fromkeys(("softmax", "gumbel_softmax", "quantize_int8", "dequantize_int8"), "N"),
    **dict.fromkeys(("cross_entropy", "linear_cross_entropy", "linear_cross_entropy_loss", "sample"), "V"),
    **dict.fromkeys(("batch_norm", "group_norm"), "shape"),
}


@pytest.mark.parametrize("op", COLUMNS)
def test_rows_have_every_remainder_of_a_16_byte_load(op: str) -> None:
    """A kernel that loses the last column at one remainder would pass otherwise. 16 bytes are eight 16-bit values."""
    values = [case[COLUMNS[op]] for case in small(SPECS[op])]
    lengths = [math.prod(v[2:]) if isinstance(v, tuple) else v for v in values]
    assert {n % 8 for n in lengths if n > 8} == set(range(8))
