"""The planner beside published measurements: which rows may set constants, and how good the predictions are."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from bagu.bench.train_shapes import SHAPES
from bagu.parallel.planner.calibration import CALIBRATION, Calibration
from bagu.parallel.planner.cluster import CLUSTERS
from bagu.parallel.planner.interval import INTERVALS, learn
from bagu.parallel.planner.layouts import Layout, Layouts, Workload
from bagu.parallel.planner.memory import memory, room
from bagu.parallel.planner.rows import CALIBRATE, JUDGE, left_out, own, read_rows, sources
from bagu.parallel.planner.software import STACKS
from bagu.parallel.planner.step import step_time
from bagu.parallel.planner.validate import Compared, Report, rank, validate
from benchmarks.tools import plan_document
from benchmarks.tools.plan_calibrate import RANGES, calibration_rows, loss

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "train" / "nvidia-h200.jsonl"
DOCUMENT = ROOT / "docs" / "planner.md"


@pytest.fixture(scope="module")
def report() -> Report:
    return validate()


def test_calibration_uses_megatron_and_nanotron_alone() -> None:
    assert CALIBRATE == ("sc21-table1", "sc21-table2", "korthikanti", "megatron-core", "nanotron")
    assert {row.source for row in calibration_rows()} == set(CALIBRATE)
    assert all(row.judge is None for row in calibration_rows())


def test_every_other_source_only_judges() -> None:
    assert JUDGE == ("mosaicml", "bloom", "torchtitan", "dgxc", "nanotron-unseen")
    judging = [name for name in sources() if name not in CALIBRATE]
    assert {next(j for j in JUDGE if name.startswith(j)) for name in judging} == set(JUDGE)
    assert all((row.judge is None) == (row.source in CALIBRATE) for row in read_rows())


def test_the_constants_are_the_minimum_over_the_calibration_rows() -> None:
    """No constant moved by 10 % lowers the calibration error by more than the rounding of the constants does."""
    rows = calibration_rows()
    lowest = loss(CALIBRATION, rows)
    assert set(RANGES) == {field.name for field in fields(Calibration)}
    for name, (low, high) in RANGES.items():
        for factor in (0.9, 1.1):
            value = min(max(getattr(CALIBRATION, name) * factor, low), high)
            assert loss(replace(CALIBRATION, **{name: value}), rows) > lowest - 5e-4, (name, value)


def test_step_time_of_rows_that_only_judge(report: Report) -> None:
    assert report.judged_error <= 0.12
    assert {name: error for name, (judges, _, error, _) in report.errors.items() if judges and error > 0.20} == {}


def test_layouts_are_put_in_the_right_order(report: Report) -> None:
    for title, share, pairs, sets in report.rankings:
        assert share >= 0.70, title
        assert pairs > 200, title
        assert all(one.rows >= 8 for one in sets)


def test_the_benchmark_on_one_h200(report: Report) -> None:
    rows = [row for row in report.own if row.model == "llama_1b"]
    assert len(rows) >= 3
    assert all(abs(row.time_error) <= 0.10 and abs(row.memory_error) <= 0.05 for row in rows)


@pytest.mark.parametrize(
    ("shape", "gain", "gib"), [("llama_1b", 1.282, (61.0, 57.7)), ("llama_8b_4", 1.428, (26.4, 27.1))]
)
def test_fp8_gains_what_was_measured(shape: str, gain: float, gib: tuple[float, float]) -> None:
    """One micro-batch on one H200, docs/journal/013-fp8-training.md; no constant was set with it."""
    chosen, stack = SHAPES[shape], STACKS["bagu"]
    layouts = Layouts.of(Layout(micro_batch=len(chosen.lengths)))
    seconds, predicted = [], []
    for precision in ("bf16", "fp8"):
        work = Workload(model=chosen.model, seq=2048, batch=len(chosen.lengths), precision=precision)  # type: ignore[arg-type]
        seconds.append(float(step_time(work, CLUSTERS["h200"], stack, layouts).total[0]))
        predicted.append(float(memory(work, stack, layouts).allocated[0]) / 2**30)
    assert seconds[0] / seconds[1] == pytest.approx(gain, rel=0.03)
    assert predicted == pytest.approx(gib, rel=0.06)


def test_what_fits_is_right_on_every_known_row() -> None:
    """No run that ran out of memory is said to fit, and at most 5 % of those that ran are refused."""
    verdicts = [
        (
            row.out_of_memory,
            float(memory(row.workload, row.software, Layouts.of(row.layout)).total[0]) > room(row.cluster.gpu),
        )
        for row in read_rows()
    ]
    assert (True, False) not in verdicts
    assert sum(v == (False, True) for v in verdicts) <= 0.05 * sum(not failed for failed, _ in verdicts)


def test_the_intervals_are_those_of_the_published_rows(report: Report) -> None:
    assert learn(report.done) == INTERVALS


def test_own_rows_are_those_of_the_benchmark() -> None:
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    names = {"bagu": "bf16", "bagu fp8": "fp8"}
    measured = {
        (row["shape"], names[row["implementation"]], row["micro_batches"]): row
        for row in lines
        if row["implementation"] in names
    }
    for row in own():
        found = measured[row["model"], row.get("precision", "bf16"), row["micro_batches"]]
        assert (row["peak_bytes"], row["step_s"]) == (found["peak_bytes"], round(found["step_s"], 5))


def test_the_document_has_these_figures(report: Report) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert plan_document.updated(text, report) == text, "run python -m benchmarks.tools.plan_document"


def test_rows_are_complete_and_left_out_ones_say_why() -> None:
    rows = read_rows()
    assert len(rows) + len(left_out()) == 408
    assert all(row.measured_s is not None or row.out_of_memory for row in rows)
    assert all(
        row.workload.batch % (row.layout.dp * row.layout.micro_batch) == 0 for row in rows if row.judge == "dgxc"
    )
    assert all(len(reason) > 20 for _, reason in left_out())


def test_ranking_counts_pairs_that_differ() -> None:
    """Eight rows: seven equal ones and a faster one, which the prediction puts last."""
    row = next(r for r in read_rows() if r.source == "bloom")
    same = [Compared(row=row, predicted_s=100.0) for _ in range(7)]
    fast = replace(row, measured_s=0.9 * (row.measured_s or 0))
    (found,) = rank([*same, Compared(row=fast, predicted_s=101.0)], lambda r: r.model)
    assert (found.rows, found.pairs, found.right) == (8, 7, 0)
    (found,) = rank([*same, Compared(row=fast, predicted_s=99.0)], lambda r: r.model)
    assert found.right == 7
    assert rank(same, lambda r: r.model) == []  # fewer than eight
