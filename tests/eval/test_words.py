"""Scores and differences are written in one way everywhere; progress without a terminal is plain lines."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from bagu.eval.intervals import Comparison, Estimate
from bagu.eval.words import PERCENT, p_value, scale_of
from bagu.runs.plain_progress import PlainLines

SCORE = Estimate(mean=0.4123, low=0.381, high=0.44, items=50, clusters=50)
MOVED = Comparison(difference=0.012, low=-0.003, high=0.027, p_value=0.04321, items=50, clusters=50)


def test_shares_are_written_in_percent_and_losses_in_bits() -> None:
    scale = scale_of("accuracy_characters")
    assert scale.score_and_interval(SCORE) == "41.2 % (38.1 to 44.0)"
    assert scale.difference(MOVED) == "+1.2 (-0.3 to +2.7)"
    assert replace(PERCENT, digits=0).score_and_interval(SCORE) == "41 % (38 to 44)"
    assert scale_of("bits_per_byte").score_and_interval(SCORE) == "0.412 (0.381 to 0.440)"
    assert scale_of("bits_per_byte").difference(MOVED) == "+0.012 (-0.003 to +0.027)"
    assert p_value(MOVED) == "0.043"


def test_plain_lines_come_every_few_seconds_with_the_rate_of_this_process() -> None:
    """An evaluation that resumes at 100 of 300 items, 25 items a second."""
    file, times = io.StringIO(), iter([0.0, 2.0, 6.0, 8.0])
    lines = PlainLines("items", Console(file=file, width=30), prefix="recall: ", clock=lambda: next(times))
    for done in (100, 150, 250, 300):
        lines(done, 300)
    assert file.getvalue() == "recall: 250 of 300 items in 6 s, about 2 s left\n"
