"""How many steps of each recipe fit in the minutes of `bagu demo --vision`.

A recipe is planned when its turn comes, by the pace of a step that was just measured, with its share of the time that
is left. So what one recipe took too much or too little, the later ones have less or more of; the last one is the
smallest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SHARES = {"clip": 0.4, "vlm": 0.4, "groupvit": 0.2}  # of the time, in the order in which they run
SCORES = {"clip": 5, "vlm": 4, "groupvit": 2}  # the time of scores and pictures, in steps of the recipe
FEWEST = 10  # steps of a recipe that is shown
STARTED_S = 5.0  # before the first recipe: Python, torch and the fonts
ENDING_S = 2.0  # the page


@dataclass
class Budget:
    seconds: float
    clock: Callable[[], float] = time.monotonic
    done: set[str] = field(default_factory=set)  # recipes that had their turn

    def __post_init__(self) -> None:
        self._began = self.clock() - STARTED_S

    @property
    def spent(self) -> float:
        return self.clock() - self._began

    def share(self, name: str) -> float:
        """The seconds for a recipe: its share of what is left, among those that are still to come."""
        weight = sum(share for other, share in SHARES.items() if other not in self.done or other == name)
        return max(self.seconds - self.spent - ENDING_S, 0.0) * SHARES[name] / weight

    def steps(self, name: str, pace_s: float) -> int:
        """The steps of a recipe whose turn it is; 0 if fewer than FEWEST fit, with the scores after them."""
        self.done.add(name)
        steps = int(self.share(name) / pace_s) - SCORES[name]
        return steps if steps >= FEWEST else 0

    def reason(self, name: str, pace_s: float) -> str:
        """Why a recipe has no steps."""
        need = (FEWEST + SCORES[name]) * pace_s
        return (
            f"a step takes {pace_s:.1f} s here, so {FEWEST} steps and their scores need {need:.0f} s, and its share of "
            f"the time left is {self.share(name):.0f} s"
        )
