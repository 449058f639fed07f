"""The planner: which layout of a training run is fastest on a cluster, and does it fit.

>>> plan = best(Workload(model=model_of("llama3-70b"), seq=8192, batch=1024), CLUSTERS["h100"], gpus=1024)
>>> plan.winner.layout, plan.winner.step_s
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagu.parallel.planner.calibration import CALIBRATION, Calibration
from bagu.parallel.planner.cluster import Cluster
from bagu.parallel.planner.interval import INTERVALS, kind_of
from bagu.parallel.planner.layouts import Layout, Layouts, Workload
from bagu.parallel.planner.memory import Memory, memory, room
from bagu.parallel.planner.model_cost import model_cost
from bagu.parallel.planner.refusals import check, does_not_fit, no_layout
from bagu.parallel.planner.search import candidates
from bagu.parallel.planner.software import STACKS, Software
from bagu.parallel.planner.step import StepTime, step_time

GiB = 2**30


def best(
    workload: Workload,
    cluster: Cluster,
    gpus: int,
    *,
    software: Software = STACKS["bagu"],
    calibration: Calibration = CALIBRATION,
) -> Plan:
    """Rank every layout of `workload` over `gpus` GPUs that fits by its predicted step time."""
    check(workload, cluster, gpus)
    layouts = candidates(workload, cluster, gpus)
    if not len(layouts):
        raise no_layout(workload, cluster, gpus)
    needs = memory(workload, software, layouts)
    fits = needs.total <= room(cluster.gpu)
    if not fits.any():
        raise does_not_fit(workload, cluster, gpus, software, layouts, needs)
    times = step_time(workload, cluster, software, layouts.where(fits), calibration)
    return Plan(
        workload=workload,
        cluster=cluster,
        gpus=gpus,
        software=software,
        considered=layouts,
        needs=needs,
        fits=fits,
        times=times,
        order=np.argsort(times.total, kind="stable"),
    )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One layout with its prediction. Times are seconds by cause, memory bytes by kind."""

    layout: Layout
    step_s: float
    seconds: dict[str, float]
    memory_bytes: dict[str, float]
    tokens_per_s: float
    mfu: float
    between_s: tuple[float, float]  # where the measured step of nine in ten published runs of this kind would be

    @property
    def memory_gib(self) -> float:
        return sum(self.memory_bytes.values()) / GiB

    def days(self, tokens: float) -> float:
        return tokens / self.tokens_per_s / 86_400


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All layouts that were considered, and the times of those that fit, fastest first in `order`."""

    workload: Workload
    cluster: Cluster
    gpus: int
    software: Software
    considered: Layouts
    needs: Memory
    fits: NDArray[np.bool_]
    times: StepTime
    order: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.order)

    def choice(self, rank: int) -> Choice:
        """The layout in place `rank` (0 is the fastest)."""
        i = int(self.order[rank])
        at = int(np.flatnonzero(self.fits)[i])
        tokens = self.workload.batch * self.workload.seq
        step_s = float(self.times.total[i])
        flops = tokens * model_cost(self.workload.model).training_flops(self.workload.seq)
        layout = self.considered[at]
        low, high = INTERVALS[kind_of(self.workload, layout, self.cluster)]
        return Choice(
            layout=layout,
            between_s=(low * step_s, high * step_s),
            step_s=step_s,
            seconds={name: float(part[i]) for name, part in vars(self.times).items()},
            memory_bytes={name: float(part[at]) for name, part in vars(self.needs).items()},
            tokens_per_s=tokens / step_s,
            mfu=flops / step_s / (self.gpus * self.cluster.gpu.peak_bf16_tflops * 1e12),
        )

    @property
    def winner(self) -> Choice:
        return self.choice(0)

    def distinct(self, count: int) -> list[Choice]:
        """The fastest layout of each of the best `count` divisions of the GPUs and ZeRO stages."""
        found: dict[tuple[int, ...], Choice] = {}
        fitting = self.considered.where(self.fits)
        for rank, i in enumerate(self.order):
            x = fitting
            key = tuple(int(a[i]) for a in (x.dp, x.shard, x.tp, x.cp, x.pp, x.ep, x.zero))
            if key not in found:
                found[key] = self.choice(rank)
                if len(found) == count:
                    break
        return list(found.values())
