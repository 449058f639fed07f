"""`bagu profile op | train | serve`: where the time of a step goes, and what to do about it.

A few steps run under torch.profiler after a warm-up. The trace is written for Perfetto (ui.perfetto.dev). The summary
adds up the time by kernel on a GPU, by operator on a CPU, and the time in which the GPU waits for the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from bagu.bench.harness import table
from bagu.bench.units import duration
from bagu.runs.plot_style import write_plot
from bagu.runs.record import ensure_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WARMUP = 3
SHORT_S = 5e-6  # a kernel below this takes less time than its launch
COPIES = ("copy", "memcpy", "contiguous", "clone", "cat")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """All runs of one kernel or operator."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """`seconds` is the wall time of all steps, `busy_s` the time in which kernels (on a CPU: operators) ran."""

    device: str
    steps: int
    seconds: float
    busy_s: float
    entries: tuple[Entry, ...]  # the longest first

    @property
    def calls(self) -> int:
        return sum(e.calls for e in self.entries)


def profiled(step: Callable[[], object], device: torch.device, *, steps: int, trace: Path) -> Profile:
    """Run `step` with the profiler, write the trace, and add up the times."""
    from torch.profiler import ProfilerActivity, profile

    ensure_folder(trace.parent)
    for _ in range(WARMUP):
        step()
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as found:
        for _ in range(steps):
            with torch.profiler.record_function("step"):
                step()
        if on_gpu:
            torch.cuda.synchronize(device)
    found.export_chrome_trace(str(trace))
    events = list(found.events())
    bounds = [(e.time_range.start, e.time_range.end) for e in events if e.name == "step" and not _on_gpu(e)]
    runs = [e for e in events if e.name != "step" and _on_gpu(e) == on_gpu]
    spans = [(e.time_range.start, e.time_range.end) for e in runs]
    end = max((e for _, e in (*bounds, *spans)), default=0.0)
    times: dict[str, list[float]] = defaultdict(list)
    for event in runs:
        times[event.name].append((event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total) / 1e6)
    entries = [Entry(name=n, calls=len(ts), seconds=sum(ts)) for n, ts in times.items()]
    return Profile(
        device=device.type,
        steps=steps,
        seconds=(end - min(b for b, _ in bounds)) / 1e6,
        busy_s=_union(spans) / 1e6,
        entries=tuple(sorted(entries, key=lambda e: -e.seconds)),
    )


def _on_gpu(event: Any) -> bool:
    return bool(event.device_type == torch.autograd.DeviceType.CUDA)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def advice(p: Profile) -> list[str]:
    """One sentence for each finding."""
    found, idle = [], 1 - p.busy_s / p.seconds
    short = [e for e in p.entries if e.seconds / e.calls < SHORT_S]
    copied = sum(e.seconds for e in p.entries if any(word in e.name.lower() for word in COPIES))
    if p.device == "cuda" and idle > 0.1:
        found.append(
            f"The GPU is idle {idle:.0%} of the time, with {p.calls // p.steps} launches a step:"
            " run more tokens a step, or capture the step as a CUDA graph."
        )
    if p.device != "cuda" and idle > 0.1:
        found.append(f"{idle:.0%} of the time is outside operators: Python, or C++ that torch does not see.")
    if short and sum(e.seconds for e in short) > 0.2 * p.busy_s:
        count = sum(e.calls for e in short) // p.steps
        found.append(f"{count} calls a step take less than {SHORT_S * 1e6:.0f} us each: fuse or batch them.")
    if copied > 0.1 * p.busy_s:
        found.append(f"Copies take {copied / p.busy_s:.0%}: look for layouts that differ between two layers.")
    if p.entries and (first := p.entries[0]).seconds > 0.5 * p.busy_s:
        share = first.seconds / p.busy_s
        found.append(f"{first.name} takes {share:.0%}: compare it with its ceiling by `bagu bench ops`.")
    return found or ["No single cause stands out: the time is spread over the operators in the table."]


def report(p: Profile, console: Console, out: Path, title: str, notes: Sequence[str] = ()) -> None:
    """Print the table and the findings, and write profile.svg and .png beside the trace."""
    total = sum(e.seconds for e in p.entries) or 1.0
    lines = [
        (e.name[:60], str(e.calls // p.steps or 1), duration(e.seconds / p.steps), f"{e.seconds / total:.1%}")
        for e in p.entries[:12]
    ]
    where = "kernel" if p.device == "cuda" else "operator"
    console.print(table(title, (where, "calls a step", "time a step", "share"), lines))
    console.print(f"{duration(p.seconds / p.steps)} a step, {p.busy_s / p.seconds:.0%} of it in {where}s")
    for line in (*notes, *advice(p)):
        console.print(f"- {line}")
    reason = write_plot(lambda figure: _plot(figure, p, title), out / "profile", (8, 4), {"svg.hashsalt": title})
    console.print(f"[dim]{out}/trace.json (open in Perfetto){f'; no plot: {reason}' if reason else ', profile.svg'}[/]")


def _plot(figure: Figure, p: Profile, title: str) -> None:
    shown = p.entries[:12][::-1]
    axes = figure.subplots()
    axes.barh([e.name[:44] for e in shown], [1e3 * e.seconds / p.steps for e in shown], color="#0072b2")
    axes.set(title=title, xlabel="ms a step")
    axes.grid(True, axis="x")
