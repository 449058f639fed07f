"""Run labs: measure, decide, write `<out>/<machine>/<lab>/result.json` and the plots, print the verdict.

run_labs(names, out=..., quick=...)    run some or all; returns the exit status
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from bagu.config import write_atomic
from bagu.errors import BaguError
from bagu.lab import catalogue, draw
from bagu.lab.core import Lab, Result, Row, Setting, T, Verdict, numbers_in
from bagu.machine.cores import available_cores
from bagu.machine.device import default_device, this_machine
from bagu.machine.environment import environment
from bagu.machine.terminal import Terminal, counted
from bagu.runs.plain_progress import plain_progress
from bagu.runs.record import ensure_folder

COLOUR = {"held": "green", "did not hold": "red", "holds only where": "yellow", "not decided": "blue"}
MOST_JOBS = 4  # of a quick run by default: each process has torch and up to 1 GB
SEEDS = 3  # the fewest that decide where models are trained and compared


def run_labs(
    names: Sequence[str],
    *,
    out: Path,
    quick: bool,
    resume: bool = False,
    jobs: int = 1,
    console: Console | None = None,
) -> int:
    """Run the named labs, or all if `names` is empty. Returns 0 if each lab ran or was skipped because it needs a GPU.
    With `resume`, labs with such a result (quick or full) from the same code are skipped. With several `jobs`, labs
    run beside each other, one thread each; those that measure times run alone afterwards.

    A verdict is not a failure. A lab that raises stops the run; earlier results are on disk.
    """
    console = console or Terminal(highlight=False)
    labs = [catalogue.load(name) for name in names or catalogue.names()]  # a wrong name raises before any work
    machine, device = this_machine().name, default_device().type
    paths = {lab.name: out / machine / lab.name / "result.json" for lab in labs}
    labs = [lab for lab in labs if not (resume and is_current(paths[lab.name], lab.name, quick=quick))]
    beside = [lab for lab in labs if lab.evidence != "timing" and not lab.needs_gpu] if jobs > 1 else []
    measure = partial(_measure, out=out, machine=machine, device=device, quick=quick)
    for name, done in _at_once([lab.name for lab in beside], measure, jobs):
        _introduce(catalogue.load(name), console)
        _conclude(done, paths[name].parent, console)
    for lab in labs:
        if lab in beside:
            continue
        _introduce(lab, console)
        if lab.needs_gpu and device != "cuda":
            console.print("[yellow]skipped[/]: this lab needs a CUDA device")
            continue
        _conclude(measure(lab.name, console=console), paths[lab.name].parent, console)
    console.print(f"[dim]next: bagu lab report --out {out}[/]", soft_wrap=True)
    return 0


def default_jobs() -> int:
    """Of many quick runs: one per core of a CPU. A full run may need the memory and the cores alone."""
    return min(available_cores(), MOST_JOBS) if default_device().type == "cpu" else 1


def _measure(
    name: str, *, out: Path, machine: str, device: str, quick: bool, console: Console | None = None
) -> tuple[Result, str | None]:
    """Run a lab and store its result, which comes back with the reason if there is no plot."""
    lab = catalogue.load(name)
    result = run_lab(lab, machine=machine, device=device, quick=quick, console=console or Terminal(quiet=True))
    return result, store(lab, result, ensure_folder(out / machine / name))


def _at_once(
    names: Sequence[str], measure: Callable[[str], tuple[Result, str | None]], jobs: int
) -> Iterator[tuple[str, tuple[Result, str | None]]]:
    """Labs in so many processes, in the order in which they end."""
    if not names:
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        running = {pool.submit(measure, name): name for name in names}
        try:
            for done in as_completed(running):
                yield running[done], done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one_thread() -> None:
    """Labs beside each other share the cores, and so do the processes that they start."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def _introduce(lab: Lab, console: Console) -> None:
    console.print(f"\n[bold]{escape(lab.title_en)}[/] · {escape(lab.title_zh)}")
    console.print(f"“{escape(lab.claim_en)}”\n“{escape(lab.claim_zh)}”", style="dim")


def _conclude(done: tuple[Result, str | None], folder: Path, console: Console) -> None:
    result, reason = done
    show(result, console)
    if reason is not None:
        console.print(f"[yellow]no plot[/]: {escape(reason)}")
    console.print(f"[dim]{counted(len(result.rows), 'row')} in {result.seconds:.1f} s → {escape(str(folder))}[/]")


def show(result: Result, console: Console) -> None:
    """Print the verdict in both languages, with its size, what it would take to decide, and whether times count."""
    v = result.verdict
    size = f" [dim]({v.size})[/]" if v.size else ""
    console.print(f"[{COLOUR[v.kind]}]{v.kind}[/]{size}: {escape(v.sentence_en)}\n{escape(v.sentence_zh)}")
    if v.takes_en:
        console.print(f"To decide: {escape(v.takes_en)}\n要下结论：{escape(v.takes_zh)}")
    if result.loaded:
        console.print(f"[yellow]loaded[/]: {result.load:.1f} waiting processes a core when it began; times may be off")


def is_current(path: Path, name: str, *, quick: bool) -> bool:
    """Whether the result at `path` is from the code that the lab has now. A broken file is not."""
    try:
        result = Result.read(path) if path.exists() else None
    except BaguError:  # a kill may have left it
        return False
    return result is not None and result.quick == quick and result.code == catalogue.code_digest(name)


def judged(lab: Lab, rows: Sequence[Row], *, quick: bool) -> Verdict:
    """The lab's verdict with the size it is of. Numbers that cannot decide leave it open: those of a quick run where
    training matters, and those of fewer than SEEDS seeds where trained models are compared."""
    seeds = len(numbers_in(rows, "seed")) or int(max(numbers_in(rows, "seeds"), default=1))
    learned = lab.evidence in ("training", "model")
    v = lab.verdict(rows).of_size(size_of(rows, seeds) if learned else "")
    if v.kind == "not decided":
        return v
    if quick and learned:
        return v.undecided(
            f"a full run (bagu lab run {lab.name}): after so few steps the models have learned nothing.",
            f"完整运行（bagu lab run {lab.name}）：步数太少，模型还什么都没有学到。",
        )
    if lab.evidence == "training" and seeds < SEEDS:
        return v.undecided(f"{SEEDS} seeds or more; these are {seeds}.", f"至少 {SEEDS} 个种子；现在只有 {seeds} 个。")
    return v


def size_of(rows: Sequence[Row], seeds: int) -> str:
    """Parameters, steps and seeds of the models that were trained, where the rows have them."""
    found = []
    for key in ("parameters", "steps"):
        sizes = sorted({int(s) for s in numbers_in([r for r in rows if key in r], key)})
        if sizes:
            found.append(f"{sizes[0]:,}{f' to {sizes[-1]:,}' if len(sizes) > 1 else ''} {key}")
    return ", ".join([*found, f"{seeds} seeds"] if found and seeds > 1 else found)


def run_lab(lab: Lab, *, machine: str, device: str, quick: bool, console: Console) -> Result:
    """Measure one lab and decide. Writes nothing."""

    def track(points: Sequence[T]) -> Iterator[T]:
        return (
            _bar(points, lab.name, console)
            if console.is_terminal
            else plain_progress(points, "points", console, prefix=f"{lab.name}: ")
        )

    start, load = time.perf_counter(), os.getloadavg()[0] / available_cores() if hasattr(os, "getloadavg") else None
    rows = list(lab.run(Setting(device=device, quick=quick, track=track)))
    return Result(
        lab=lab.record(),
        rows=rows,
        verdict=judged(lab, rows, quick=quick),
        environment=environment(),
        machine=machine,
        device=device,
        quick=quick,
        seconds=round(time.perf_counter() - start, 3),
        code=catalogue.code_digest(lab.name),
        load=None if load is None else round(load, 2),
    )


def store(lab: Lab, result: Result, folder: Path) -> str | None:
    """Write the result, then its plots. Returns the reason if the plots were not drawn, else None."""
    text = result.to_json()
    for name in draw.FILES:  # an old plot would not match the new rows
        (folder / name).unlink(missing_ok=True)
    write_atomic(folder / "result.json", text)
    return draw.draw(lab.name, lab.plot(result.rows), folder)


def _bar(points: Sequence[T], name: str, console: Console) -> Iterator[T]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("points"))
    times = (TimeElapsedColumn(), TextColumn("elapsed, left"), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True) as progress:
        yield from progress.track(points, description=name)
