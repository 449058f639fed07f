"""What a recommendation says, or why there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bagu.process.words import Lang, say

Row = dict[str, float | str]


@dataclass(frozen=True)
class Refusal:
    kind: str
    facts: dict[str, Any]

    def words(self, lang: Lang = "en") -> str:
        return say(self.kind, self.facts, lang)


@dataclass(frozen=True)
class Forecast:
    """A prediction for one row. `mean` is what the rows that did not choose it say; `promise` the lower bound of that
    (the upper one for a goal of min); `low` and `high` hold the next measured value in 90 % of cases."""

    mean: float
    promise: float
    low: float
    high: float
    limits: dict[str, float]  # probability of each
    distance: float  # to the data; at most 1 is inside
    far_in: str  # the input in which it is farthest from the data


@dataclass(frozen=True)
class Recommendation:
    settings: Row
    forecast: Forecast
    moves: dict[str, float]  # from the present settings, where they are given
    nearest: tuple[Row, ...]  # the three most similar runs, with their measured targets
    sensitivity: dict[str, float]  # change of the goal for one standard deviation of each setting


@dataclass(frozen=True)
class Answer:
    context: Row
    choices: tuple[Recommendation, ...]
    present: Forecast | None
    best_run: Row  # the best row of the history
    best_run_here: float  # what the model says of its settings in this context
    experiment: (
        tuple[Row, float] | None
    )  # a wider answer, outside of the data, and its predicted mean: to be tried only
