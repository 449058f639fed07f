"""What to try next: runs that may be better and whose result would teach most, each after the one before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bagu.process.answer import Refusal, Row
from bagu.process.candidates import EVEN, JITTER, VARIED, Box
from bagu.process.recommend import MIN_DISTANCE, WIDER, full_context, limit_probabilities, outside
from bagu.process.run import Process

CURIOSITY = 1.0  # standard deviations of the upper bound
CHANCE = 0.8  # of every limit


@dataclass(frozen=True)
class Experiment:
    """`sd` is the uncertainty of the mean before the run, `after` that which its result would leave."""

    settings: Row
    mean: float
    sd: float
    after: float
    distance: float


def experiments(process: Process, given: Row, count: int) -> list[Experiment] | Refusal:
    """At most `count` runs in one context, within two radii of the data. Each takes the largest mean + sd; its expected
    result then counts as measured (kriging believer, Ginsbourger et al. 2010), and the next one is elsewhere."""
    context = full_context(process, given)
    if (refusal := outside(process, context)) is not None:
        return refusal
    box, rng = Box(process, {}, {}), np.random.default_rng(0)
    points = box.settled(np.vstack([box.even(EVEN), box.around(box.history(), VARIED, JITTER, rng)]))
    x = process.encoder.matrix(box.rows(points, context))
    near = process.domain.distance(x)
    keep = near <= WIDER
    if probabilities := limit_probabilities(process, x):
        keep &= np.min(list(probabilities.values()), axis=0) >= CHANCE
    if not keep.any():
        return Refusal("nothing_inside", {})
    points, x, near = points[keep], x[keep], near[keep]
    gp, rows, y = process.goal.model.gp, process.x, process.y
    free, found = np.ones(len(x), bool), list[Experiment]()
    for _ in range(count):
        now = gp.on(rows, y)
        mean, sd = now.mean_sd(x)
        if not free.any():
            break
        best = int(np.where(free, process.better * mean + CURIOSITY * sd, -np.inf).argmax())
        free &= np.linalg.norm(x - x[best], axis=1) >= MIN_DISTANCE
        rows, y = np.vstack([rows, x[best]]), np.r_[y, mean[best]]
        after = gp.on(rows, y).mean_sd(x[best : best + 1])[1][0]
        found.append(
            Experiment(box.row(points[best]), float(mean[best]), float(sd[best]), float(after), float(near[best]))
        )
    return found
