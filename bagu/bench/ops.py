"""`bagu bench ops`: every op on every backend and its peers, as a fraction of a ceiling measured in the same run.

The ceilings are measured first. Then each implementation runs at each benchmark case (`ops_timing`), and its rows are
compared with the ceilings (`roofline`), printed, and appended to the results as soon as an op is done. On a CPU and
with --quick the sizes shrink to a budget (`sizing.shrink`), and a row has the size that ran.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bagu.bench import ops_plot, ops_table
from bagu.bench.harness import RESULTS, Rows
from bagu.bench.implementations import chosen_backends, implementations, label
from bagu.bench.ops_timing import Job, Point, Setting, rows_of, time_job
from bagu.bench.options import OpsBench, OpSetting
from bagu.bench.roofline import higher
from bagu.bench.sizing import dtype_named, shrink
from bagu.errors import UnknownName
from bagu.machine.ceilings import Ceilings, measure_ceilings
from bagu.machine.device import named_device
from bagu.machine.timing import flush_buffer
from bagu.ops import catalogue
from bagu.ops.contract.core import OpSpec
from bagu.runs.plain_progress import plain_progress

HOST_BYTES = 1 << 18  # that a forward moves where the host is timed: microseconds of a GPU, so that it never waits
RETRIES = 2  # a result above its ceiling is measured again, with the ceiling: usually the machine was busy


def main(given: OpsBench, setting: OpSetting) -> int:
    """Time the named ops, all by default. Exit status 1: a backend of bagu failed, or a recorded row is a fault.

    By default torch.compile is a peer, and the rows go to RESULTS, except in a quick run.
    """
    specs = [catalogue.spec(n) for n in given.names] or list(catalogue.SPECS.values())
    on, quick = named_device(setting.device), given.quick
    kind = dtype_named(setting.dtype or ("bf16" if on.type == "cuda" else "fp32"))
    compiled = not quick if given.compile is None else given.compile
    run = Setting(device=on, dtype=kind, quick=quick, compiled=compiled)
    jobs, notes = _jobs(specs, given.case, chosen_backends(specs, given.backend, on), run)
    rows = Rows(setting.out, default=None if quick else RESULTS, as_json=setting.as_json)
    # A Triton kernel runs on the current device, not on the device of its tensors.
    with torch.cuda.device(on) if on.type == "cuda" else nullcontext():
        for found in _measured(jobs, notes, run, rows):
            kept = rows.add(found)
            if rows.record is not None and kept:
                rows.console.print(_kept(kept, rows.record, draw=given.plot))
    rows.finish()
    failed = any(row["error"] and row["backend"] for row in rows.all)
    return int(failed or (rows.record is not None and any(row["fault"] for row in rows.all)))


def _measured(
    jobs: Sequence[Job], notes: Sequence[str], setting: Setting, rows: Rows
) -> Iterator[list[dict[str, Any]]]:
    """Measure the ceilings, then each op. Print and yield the rows of an op as soon as it is done."""
    console = rows.console
    console.print(ops_table.heading(rows.env, setting.device, quick=setting.quick))

    def measured() -> Ceilings:
        return measure_ceilings(setting.device, dtype=setting.dtype, quick=setting.quick)

    def judged(points: Sequence[Point]) -> list[dict[str, Any]]:
        return rows_of(points, ceilings, setting)

    ceilings = measured()
    console.print(ops_table.ceilings_line(ceilings))
    for note in notes:
        console.print(f"[yellow]note[/]  {escape(note)}")
    scrub = flush_buffer(setting.device)
    for _, group in groupby(_track(jobs, console), key=lambda job: job.spec.name):
        timed = [(job, list(time_job(job, setting, scrub))) for job in group]
        for _ in range(RETRIES):
            doubted = [i for i, (_, points) in enumerate(timed) if any(row["fault"] for row in judged(points))]
            if not doubted:
                break
            ceilings = higher(ceilings, measured())  # the ceiling may have been measured too low
            for i in doubted:
                timed[i] = (timed[i][0], list(time_job(timed[i][0], setting, scrub)))
        found = judged([point for _, points in timed for point in points])
        for part in ("", *ops_table.tables(found), *ops_table.remarks(found)):
            console.print(part)
        yield found


def _kept(rows: Sequence[Mapping[str, Any]], record: Path, *, draw: bool) -> str:
    """Plot the recorded rows of one op next to the results, and return a line with the paths."""
    reason = ops_plot.draw(rows, record.parent / "plots" / record.stem) if draw else None
    drawn = f"; no plot: {reason}" if reason else f"; plots/{record.stem}/{rows[0]['op']}.svg and .png" if draw else ""
    return f"[dim]{len(rows)} rows → {escape(f'{record}{drawn}')}[/]"


def _jobs(
    specs: Sequence[OpSpec], named: Sequence[str], backends: Sequence[str], setting: Setting
) -> tuple[list[Job], list[str]]:
    """All jobs in order, and a note for each skipped one. `named` selects cases; default: all."""
    jobs, notes = [], []
    known = {c.name for spec in specs for c in spec.cases if c.bench}
    for name in named:
        UnknownName.check("bench case", name, known)
    for spec in specs:
        runners, left_out = implementations(spec, backends, setting.device, compiled=setting.compiled)
        notes += left_out
        cases = [c for c in spec.cases if c.bench and (not named or c.name in named)][: 1 if setting.quick else None]
        jobs += [
            Job(
                spec=spec,
                case=shrink(spec, c, setting.dtype, setting.budget),
                implementation=r,
                tiny=shrink(spec, c, setting.dtype, HOST_BYTES) if i == 0 and setting.device.type == "cuda" else None,
            )
            for i, c in enumerate(cases)
            for r in runners
        ]
    if setting.device.type != "cuda" and any("triton" in s.backends for s in specs):
        notes.append("the triton backend is skipped: kernels are timed on a CUDA device")
    return jobs, list(dict.fromkeys(notes))


def _track(jobs: Sequence[Job], console: Console) -> Iterator[Job]:
    """Yield the jobs with a progress bar on a terminal, else with a line every few seconds."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs"))
        times = (TimeElapsedColumn(), TextColumn("elapsed, left"), TimeRemainingColumn())
        # Drawn only between runs: a thread that redraws during a run would affect its time.
        with Progress(*columns, *times, console=console, transient=True, auto_refresh=False) as progress:
            task = progress.add_task("", total=len(jobs))
            for job in jobs:
                who = label(job.implementation.name, backend=job.implementation.backend)
                progress.update(task, description=f"{job.spec.name} {job.case.name} {who}", refresh=True)
                yield job
                progress.advance(task)
        return
    yield from plain_progress(jobs, "runs", console)
