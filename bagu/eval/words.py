"""How scores and differences are written, in tables, reports and on the command line."""

import math
from dataclasses import dataclass

from bagu.eval.intervals import Comparison, Estimate


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A unit and the digits after the point."""

    factor: float
    digits: int
    sign: str  # follows a number
    name: str  # labels an axis

    def score(self, e: Estimate) -> str:
        """41.2 %"""
        return self._number(e.mean) + self.sign

    def interval(self, e: Estimate) -> str:
        """38.1 to 44.0; too few clusters have no interval."""
        if math.isnan(e.low):
            return "too few clusters"
        return f"{self._number(e.low)} to {self._number(e.high)}"

    def score_and_interval(self, e: Estimate) -> str:
        """41.2 % (38.1 to 44.0)"""
        return f"{self.score(e)} ({self.interval(e)})"

    def difference(self, c: Comparison) -> str:
        """+1.2 (-0.3 to +2.7)"""
        if math.isnan(c.low):
            return f"{self._number(c.difference, '+')} (too few clusters)"
        return f"{self._number(c.difference, '+')} ({self._number(c.low, '+')} to {self._number(c.high, '+')})"

    def _number(self, value: float, sign: str = "") -> str:
        return f"{value * self.factor:{sign}.{self.digits}f}"


PERCENT = Scale(factor=100, digits=1, sign=" %", name="%")
BITS = Scale(factor=1, digits=3, sign="", name="bits per byte")


def scale_of(metric: str) -> Scale:
    """A share of items is written in percent, a loss in bits per byte."""
    return BITS if metric == "bits_per_byte" else PERCENT


def p_value(c: Comparison) -> str:
    return f"{c.p_value:.2g}"
