"""What the planner predicts for models on several numbers of GPUs, for labs about layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bagu.errors import BaguError
from bagu.lab.core import Row, Setting
from bagu.parallel.plan import Plan, best
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.layouts import Workload
from bagu.parallel.planner.models import MODELS

SEQ = 8192
NAMES = ("llama3-8b", "llama3-70b", "llama3-405b")


def best_plan(name: str, gpus: int, batch: int) -> Plan | None:
    """The best plan for a step of `batch` sequences of SEQ tokens on H100; None if nothing fits on so few GPUs."""
    try:
        return best(Workload(model=MODELS[name], seq=SEQ, batch=batch), CLUSTERS["h100"], gpus)
    except BaguError:
        return None


def rows_by_size(setting: Setting, sizes: Sequence[int], measured: Callable[[str, int], Row | None]) -> list[Row]:
    """`measured` of each model on each number of GPUs, where a layout fits."""
    names = NAMES[:2] if setting.quick else NAMES
    points = [(name, gpus) for name in names for gpus in sizes]
    rows = (measured(name, gpus) for name, gpus in setting.track(points))
    return [row for row in rows if row is not None]
