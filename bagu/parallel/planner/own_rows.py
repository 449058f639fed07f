"""bagu's own training benchmark on one GPU, beside the prediction. The rows come from benchmarks/results/train; none of
them was used to set a constant."""

from __future__ import annotations

from dataclasses import dataclass

from bagu.nn.presets import preset
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.layouts import Layout, Layouts, Workload
from bagu.parallel.planner.memory import memory
from bagu.parallel.planner.rows import own
from bagu.parallel.planner.software import STACKS
from bagu.parallel.planner.step import step_time


@dataclass(frozen=True, kw_only=True)
class OwnRow:
    model: str
    gpu: str
    micro_batches: int
    measured_s: float
    predicted_s: float
    measured_bytes: int
    predicted_bytes: float  # that the allocator hands out

    @property
    def time_error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def memory_error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def own_rows() -> list[OwnRow]:
    found = []
    for row in own():
        workload = Workload(model=preset(row["model"]), seq=row["seq"], batch=row["batch"])
        layouts = Layouts.of(Layout(micro_batch=row["batch"] // row["micro_batches"]))
        cluster = CLUSTERS[row["gpu"]]
        found.append(
            OwnRow(
                model=row["model"],
                gpu=row["gpu"],
                micro_batches=row["micro_batches"],
                measured_s=row["step_s"],
                predicted_s=float(step_time(workload, cluster, STACKS["bagu"], layouts).total[0]),
                measured_bytes=row["peak_bytes"],
                predicted_bytes=float(memory(workload, STACKS["bagu"], layouts).allocated[0]),
            )
        )
    return found
