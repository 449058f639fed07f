"""How far the measured step time may be from the predicted one, learned from the published rows by kind of layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from bagu.parallel.planner.cluster import Cluster
from bagu.parallel.planner.layouts import Layout, Workload

if TYPE_CHECKING:
    from bagu.parallel.planner.validate import Compared

Kind = Literal["experts", "context parallel", "pipeline", "several nodes", "one node"]
COVERED = 0.9  # share of the rows of a kind that lie inside
# measured / predicted: what `learn` finds in the published rows (tests/parallel/test_planner_validate.py holds it)
INTERVALS: Mapping[Kind, tuple[float, float]] = {
    "experts": (1.05, 2.47),
    "context parallel": (1.0, 1.55),
    "pipeline": (0.93, 1.38),
    "several nodes": (0.94, 1.24),
    "one node": (0.93, 1.16),
}


def kind_of(workload: Workload, layout: Layout, cluster: Cluster) -> Kind:
    """The first kind that fits: what is predicted worst comes first."""
    if workload.model.moe is not None:
        return "experts"
    if layout.cp > 1:
        return "context parallel"
    if layout.pp > 1:
        return "pipeline"
    return "several nodes" if layout.gpus > cluster.gpus_per_node else "one node"


def learn(done: Sequence[Compared]) -> dict[Kind, tuple[float, float]]:
    """The interval of each kind: the quantiles of measured / predicted that leave COVERED of the rows inside."""
    found: dict[Kind, list[float]] = {kind: [] for kind in get_args(Kind)}
    for x in done:
        found[kind_of(x.row.workload, x.row.layout, x.row.cluster)].append(1 / (1 + x.error))
    outside = (1 - COVERED) / 2
    return {
        kind: (round(float(np.quantile(r, outside)), 2), round(float(np.quantile(r, 1 - outside)), 2))
        for kind, r in found.items()
    }
