"""An op's signature is stated in few places: the spec's line, the record of its arguments, the public function."""

import statistics

from bagu.ops.catalogue import SPECS
from benchmarks.tools.op_signatures import statements

FEW = 4  # inputs that functions may take one by one


def test_signatures_are_stated_three_times_in_the_median() -> None:
    assert statistics.median(len(statements(spec)) for spec in SPECS.values()) <= 3


def test_an_op_of_more_than_four_inputs_has_a_record_in_the_signatures_order() -> None:
    assert [s.name for s in SPECS.values() if len(s.names) > FEW and s.args is None] == []
