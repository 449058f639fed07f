"""Run labs: measure, decide, write `<out>/<machine>/<lab>/result.json` and the plots, print the verdict.

run_labs(names, out=..., quick=...)    run some or all; returns the exit status
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bagu.config import write_atomic
from bagu.lab import catalogue, plot
from bagu.lab.core import Lab, Result, Setting, T
from bagu.machine.device import default_device, this_machine
from bagu.machine.environment import environment
from bagu.runs.plain_progress import plain_progress
from bagu.runs.record import ensure_folder

COLOUR = {"held": "green", "did not hold": "red", "holds only where": "yellow"}


def run_labs(names: Sequence[str], *, out: Path, quick: bool, console: Console | None = None) -> int:
    """Run the named labs, or all if `names` is empty. Returns 0 if each lab ran or was skipped because it needs a GPU.

    A verdict is not a failure. A lab that raises stops the run; earlier results are on disk.
    """
    console = console or Console(highlight=False)
    labs = [catalogue.load(name) for name in names or catalogue.names()]  # a wrong name raises before any work
    machine, device = this_machine().name, default_device().type
    for lab in labs:
        console.print(f"\n[bold]{escape(lab.title_en)}[/] · {escape(lab.title_zh)}")
        console.print(f"“{escape(lab.claim_en)}”\n“{escape(lab.claim_zh)}”", style="dim")
        if lab.needs_gpu and device != "cuda":
            console.print("[yellow]skipped[/]: this lab needs a CUDA device")
            continue
        folder = ensure_folder(out / machine / lab.name)
        result = run_lab(lab, machine=machine, device=device, quick=quick, console=console)
        reason = store(lab, result, folder)
        console.print(f"[{COLOUR[result.verdict.kind]}]{result.verdict.kind}[/]: {escape(result.verdict.sentence_en)}")
        console.print(escape(result.verdict.sentence_zh))
        if reason is not None:
            console.print(f"[yellow]no plot[/]: {escape(reason)}")
        console.print(f"[dim]{len(result.rows)} rows in {result.seconds:.1f} s → {escape(str(folder))}[/]")
    return 0


def run_lab(lab: Lab, *, machine: str, device: str, quick: bool, console: Console) -> Result:
    """Measure one lab and decide. Writes nothing."""

    def track(points: Sequence[T]) -> Iterator[T]:
        return (
            _bar(points, lab.name, console)
            if console.is_terminal
            else plain_progress(points, "points", console, prefix=f"{lab.name}: ")
        )

    start = time.perf_counter()
    rows = lab.run(Setting(device=device, quick=quick, track=track))
    return Result(
        lab=lab.record(),
        rows=rows,
        verdict=lab.verdict(rows),
        environment=environment(),
        machine=machine,
        device=device,
        quick=quick,
        seconds=round(time.perf_counter() - start, 3),
    )


def store(lab: Lab, result: Result, folder: Path) -> str | None:
    """Write the result, then its plots. Returns the reason if the plots were not drawn, else None."""
    text = result.to_json()
    for name in plot.FILES:  # an old plot would not match the new rows
        (folder / name).unlink(missing_ok=True)
    write_atomic(folder / "result.json", text)
    return plot.draw(lab, result.rows, folder)


def _bar(points: Sequence[T], name: str, console: Console) -> Iterator[T]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("points"))
    times = (TimeElapsedColumn(), TextColumn("elapsed, left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True) as progress:
        yield from progress.track(points, description=name)
