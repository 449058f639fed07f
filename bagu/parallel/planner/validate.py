"""Predictions beside published measurements: error of step time and memory per source, and the ranking of layouts.

Ranking: over pairs of rows of the same model on the same cluster (GPU, number of GPUs, and for BLOOM the same state of
the machine) whose measured throughput differs by 5 % or more, in sets of 8 rows or more, the share of pairs that the
prediction puts in the measured order.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from bagu.nn.presets import preset
from bagu.parallel.planner.calibration import CALIBRATION, Calibration
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.layouts import Layout, Layouts, Workload
from bagu.parallel.planner.memory import memory, room
from bagu.parallel.planner.rows import JUDGE, Row, own, read_rows
from bagu.parallel.planner.software import STACKS
from bagu.parallel.planner.step import step_time

MIN_DIFFERENCE = 0.05  # pairs that differ by less in measured throughput are not counted
SMALLEST_SET = 8


# bagu's own training benchmark on one GPU, beside the prediction. The rows come from benchmarks/results/train; none of
# them was used to set a constant.
@dataclass(frozen=True, kw_only=True)
class OwnRow:
    model: str
    gpu: str
    precision: str
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
        precision = row.get("precision", "bf16")
        workload = Workload(model=preset(row["model"]), seq=row["seq"], batch=row["batch"], precision=precision)
        layouts = Layouts.of(Layout(micro_batch=row["batch"] // row["micro_batches"]))
        cluster = CLUSTERS[row["gpu"]]
        found.append(
            OwnRow(
                model=row["model"],
                gpu=row["gpu"],
                precision=precision,
                micro_batches=row["micro_batches"],
                measured_s=row["step_s"],
                predicted_s=float(step_time(workload, cluster, STACKS["bagu"], layouts).total[0]),
                measured_bytes=row["peak_bytes"],
                predicted_bytes=float(memory(workload, STACKS["bagu"], layouts).allocated[0]),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Compared:
    row: Row
    predicted_s: float

    @property
    def error(self) -> float:
        """Of the step time, as a fraction: 0.1 is 10 % too slow."""
        assert self.row.measured_s is not None
        return self.predicted_s / self.row.measured_s - 1

    @property
    def predicted_tokens_per_s(self) -> float:
        return self.row.workload.batch * self.row.workload.seq / self.predicted_s


@dataclass(frozen=True, kw_only=True)
class Ranking:
    name: str
    rows: int
    pairs: int
    right: int


def compare(rows: Sequence[Row], calibration: Calibration = CALIBRATION) -> list[Compared]:
    """The predictions of all rows that have a measured time."""
    done = []
    for row in rows:
        if row.measured_s is not None:
            time = step_time(row.workload, row.cluster, row.software, Layouts.of(row.layout), calibration)
            done.append(Compared(row=row, predicted_s=float(np.sum(time.total))))
    return done


def mean_error(done: Sequence[Compared]) -> float:
    return float(np.mean([abs(x.error) for x in done]))


def errors(done: Sequence[Compared]) -> dict[str, tuple[int, float, float]]:
    """(rows, mean absolute error, mean signed error) of each judging source, and of each calibration table."""
    found = {}
    for name in dict.fromkeys(x.row.judge or x.row.source for x in done):
        mine = [x for x in done if (x.row.judge or x.row.source) == name]
        found[name] = (len(mine), mean_error(mine), float(np.mean([x.error for x in mine])))
    return found


def rank(done: Sequence[Compared], key: Callable[[Row], object]) -> list[Ranking]:
    """The ranking of every set of rows with the same `key`."""
    sets: dict[object, list[Compared]] = {}
    for x in done:
        sets.setdefault(key(x.row), []).append(x)
    found = []
    for mine in sets.values():
        if len(mine) < SMALLEST_SET:
            continue
        pairs = right = 0
        for a, b in combinations(mine, 2):
            fast, slow = (a, b) if a.row.tokens_per_s > b.row.tokens_per_s else (b, a)
            if fast.row.tokens_per_s < (1 + MIN_DIFFERENCE) * slow.row.tokens_per_s:
                continue
            pairs += 1
            right += fast.predicted_tokens_per_s > slow.predicted_tokens_per_s
        if pairs:
            found.append(Ranking(name=_words(mine[0].row), rows=len(mine), pairs=pairs, right=right))
    return found


def _words(row: Row) -> str:
    model = row.workload.model
    return (
        f"{row.judge or row.source} {row.model} ({model.hidden_size} × {model.num_layers}, {model.num_heads} heads) on "
        f"{row.layout.gpus} {row.cluster_name}"
    )


def same_model_and_cluster(row: Row) -> tuple[str, str, str, int]:
    return row.judge or row.source, row.model, row.cluster_name, row.layout.gpus


def same_shape_and_cluster(row: Row) -> tuple[object, ...]:
    """Stricter: the same layers, heads and sequence length too, so that only the layout differs."""
    return (*same_model_and_cluster(row), row.workload.model, row.workload.seq, row.workload.precision)


def rankings(done: Sequence[Compared]) -> tuple[list[Ranking], list[Ranking]]:
    """By model and cluster, and by shape and cluster, of the judging sources."""
    judged = [x for x in done if x.row.judge in JUDGE]
    return rank(judged, same_model_and_cluster), rank(judged, same_shape_and_cluster)


def memory_errors(rows: Sequence[Row]) -> tuple[dict[str, tuple[int, float, float]], str]:
    """(rows, mean absolute error, mean signed error) of the memory per GPU by source; a sentence on OOM rows."""
    found: dict[str, list[float]] = {}
    failed = seen = fit = refused = 0
    for row in rows:
        need = float(memory(row.workload, row.software, Layouts.of(row.layout)).total[0])
        if row.out_of_memory:
            failed += 1
            seen += need > room(row.cluster.gpu)
            continue
        fit += 1
        refused += need > room(row.cluster.gpu)
        if row.measured_gb is not None:
            found.setdefault(row.judge or row.source, []).append(need / 1e9 / row.measured_gb - 1)
    table = {name: (len(e), float(np.mean(np.abs(e))), float(np.mean(e))) for name, e in found.items()}
    said = f"{seen} of the {failed} published runs that ran out of memory are predicted to"
    return table, f"{said}; {refused} of the {fit} that ran are refused ({100 * refused / fit:.1f} %)."


@dataclass(frozen=True, kw_only=True)
class Report:
    """All figures of the validation."""

    done: tuple[Compared, ...]
    errors: dict[str, tuple[bool, int, float, float]]  # by source: whether it judges, rows, mean and signed error
    rankings: tuple[tuple[str, float, int, list[Ranking]], ...]  # (grouping, share right, pairs, sets)
    memory: dict[str, tuple[int, float, float]]
    out_of_memory: str
    own: list[OwnRow]

    @property
    def judged_error(self) -> float:
        """Mean absolute error of the step time over the rows that only judge."""
        return mean_error([x for x in self.done if x.row.judge])

    def summary(self) -> list[tuple[str, object]]:
        worst = max((error, name) for name, (judges, _, error, _) in self.errors.items() if judges)
        lines: list[tuple[str, object]] = [
            ("rows that judge", sum(1 for x in self.done if x.row.judge)),
            ("mean error of their step time, %", 100 * self.judged_error),
            ("worst source", f"{worst[1]}: {100 * worst[0]:.1f} %"),
        ]
        return lines + [(f"pairs in the right order, {title}, %", 100 * share) for title, share, _, _ in self.rankings]


def validate(calibration: Calibration = CALIBRATION) -> Report:
    """Compare the planner with every published row."""
    rows = read_rows()
    done = compare(rows, calibration)
    by_model, by_shape = rankings(done)
    table, out_of_memory = memory_errors(rows)
    groupings = []
    for title, sets in (("same model and cluster", by_model), ("same model, sequence length and cluster", by_shape)):
        pairs = sum(x.pairs for x in sets)
        groupings.append((title, sum(x.right for x in sets) / pairs, pairs, sets))
    return Report(
        done=tuple(done),
        errors={name: (name in JUDGE, *found) for name, found in errors(done).items()},
        rankings=tuple(groupings),
        memory=table,
        out_of_memory=out_of_memory,
        own=own_rows(),
    )
