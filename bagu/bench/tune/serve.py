"""`bagu tune serve MODEL --ttft 300ms --tpot 30ms`: the settings of `bagu serve` with the highest goodput.

Goodput is the requests per second that meet the limits, under one load: a closed loop of clients, or Poisson arrivals.
Each measurement starts `bagu serve` with its settings, because every setting needs a restart; that time counts. A
roofline (roofline.py) in a simulated scheduler (simulate.py) predicts each point, search.py decides what to measure,
and `search.Recorded` keeps every measurement. The winner is a file for `bagu serve --config`.
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from bagu.bench.harness import table
from bagu.bench.options import TuneServe
from bagu.bench.serve_client import Server
from bagu.bench.serve_load import Load, connect, fitting, run_load
from bagu.bench.tune.roofline import Roofline
from bagu.bench.tune.search import Found, Recorded, Trial, search
from bagu.bench.tune.simulate import Samples, Schedule, StepTime, samples_of, schedule
from bagu.bench.tune.space import Point, Value, default_space, label, parse_space, points_of
from bagu.bench.workload import arrivals, random_workload
from bagu.config import fingerprint, write_atomic
from bagu.errors import ArgumentError, BaguError
from bagu.machine.cores import available_cores
from bagu.machine.device import default_device
from bagu.machine.terminal import Terminal
from bagu.runs.record import ensure_folder
from bagu.serve.config import EngineConfig

Start = Callable[..., AbstractContextManager[str]]  # (model, *options of bagu serve) -> the URL
SEEDS, SPACING = 3, 1000  # samples of requests that a prediction averages, and the distance of their seeds
DEFAULTS = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is tuned: the model, the load of a full measurement, and the limits in milliseconds by metric."""

    model: str
    load: Load
    limits: Mapping[str, float]
    points: tuple[Point, ...]
    roofline: Roofline
    longest: int
    on_gpu: bool

    def plan(self, point: Point, requests: int, step_s: StepTime) -> list[Schedule]:
        """What the scheduler does with the requests that are measured, and with others of the same lengths."""
        return [self._schedule(point, requests, step_s, self.load.seed + SPACING * k)[0] for k in range(SEEDS)]

    def predict(self, point: Point, requests: int) -> Samples:
        """The latencies by the roofline and the simulated scheduler."""
        return samples_of(*self._schedule(point, requests, self.roofline.step_time(point), self.load.seed))

    def _schedule(self, point: Point, requests: int, step_s: StepTime, seed: int) -> tuple[Schedule, np.ndarray]:
        one, load = dict(point), self.load
        lengths = fitting(load.inputs, load.outputs, longest=self.longest, shared_prefix=load.shared_prefix)
        work = random_workload(requests, *lengths, tokens=1, shared_prefix=load.shared_prefix, seed=seed)
        slots = int(one.get("max_num_seqs") or DEFAULTS.max_num_seqs)
        usual = EngineConfig(max_num_seqs=slots).step_tokens("cuda" if self.on_gpu else "cpu")
        return schedule(
            [(len(p), n) for p, n in zip(work.prompts, work.max_tokens, strict=True)],
            step_s,
            slots=slots,
            step_tokens=int(one.get("max_num_batched_tokens") or usual),
            clients=load.concurrency,
            arrivals=arrivals(requests, load.request_rate, seed) if load.is_poisson else None,
            cached=load.shared_prefix if one.get("enable_prefix_caching", True) else 0,
        )


def main(given: TuneServe, *, start: Start, roofline: Roofline, longest: int, console: Console | None = None) -> int:
    """Search, print prediction beside measurement, write `out`/serve.toml. Returns 1 if no request of the winner met
    the limits. `out`/trials.jsonl keeps the measurements; the same command resumes from it."""
    console = console or Terminal(highlight=False)
    model, share, seed, out = given.model, given.share, given.seed, given.out
    limits = {name: ms for name, ms in (("ttft", given.ttft), ("tpot", given.tpot)) if ms is not None}
    if not limits:
        raise ArgumentError("there is no limit to tune for", hint="give --ttft 300ms, --tpot 30ms or both")
    if not 0 < share <= 1:
        raise ArgumentError(f"a budget of {share} of the grid's time", hint="use a share above 0 and at most 1")
    load = Load(
        requests=given.requests,
        inputs=given.inputs,
        outputs=given.outputs,
        shared_prefix=given.shared_prefix,
        max_concurrency=given.max_concurrency,
        goodput=limits,
        seed=seed,
        warmups=2,
        request_rate=math.inf if given.request_rate is None else given.request_rate,
    )
    load = replace(load, requests=given.requests or max(64, 6 * (load.concurrency or 1)))
    on_gpu = default_device().type == "cuda"
    usual = default_space(available_cores(), on_gpu=on_gpu, shared_prefix=given.shared_prefix > 0)
    points = tuple(points_of(parse_space(given.values, usual)))
    task = Task(model=model, load=load, limits=limits, points=points, roofline=roofline, longest=longest, on_gpu=on_gpu)
    name = fingerprint(
        {
            "model": str(model),
            "limits": limits,
            "space": [dict(p) for p in task.points],
            "seed": seed,
            "load": [str(load), load.requests, str(load.inputs), str(load.outputs), load.shared_prefix],
            "share": share,
        }
    )
    measure = Recorded(
        ensure_folder(out) / "trials.jsonl", name, lambda p, n: _measure(task, start, p, n, out, console)
    )
    full = load.requests or 1
    short = min(full, max(full // 4, 2 * (load.concurrency or 8)))
    console.print(
        f"{len(task.points)} points, {load}, at most {share:.0%} of the time of all; record {out}/trials.jsonl"
    )
    found = search(task.points, roofline, task.plan, measure, limits, first=_first(task), requests=full, short=short,
                   share=share, seed=seed)  # fmt: skip
    if measure.replayed:
        console.print(f"{measure.replayed} measurements are from the record")
    best = next(t for t in reversed(found.trials) if t.point == found.best and t.requests == full)
    _show(task, found, console)
    write_atomic(out / "serve.toml", _config(task, found, best))
    console.print(f"winner: {label(found.best)}; bagu serve {model} --config {out / 'serve.toml'}")
    good = best.samples.goodput(limits) if best.samples is not None else 0.0
    if not good:
        console.print("no request of the winner met the limits: they are too tight for this model, load and machine")
    return int(not good)


def _first(task: Task) -> Point:
    """The baseline: the default settings, or the point that has most of them, and otherwise the largest limits."""
    spare = max(1, available_cores() - 1)
    defaults: dict[str, tuple[Value, ...]] = {
        "max_num_seqs": (None, DEFAULTS.max_num_seqs),
        "max_num_batched_tokens": (None, DEFAULTS.step_tokens("cuda" if task.on_gpu else "cpu")),
        "enable_prefix_caching": (None, True),
        "threads": (None, spare),
    }

    def likeness(point: Point) -> tuple[int, int]:
        same = sum(value in defaults.get(name, (None,)) for name, value in point)
        return same, sum(value for name, value in point if name.startswith("max_") and isinstance(value, int))

    return max(task.points, key=likeness)


def options_of(point: Point) -> dict[str, Value]:
    """The options of `bagu serve` that the point sets."""
    return {name: value for name, value in point if value is not None}


def _measure(task: Task, start: Start, point: Point, requests: int, out: Path, console: Console) -> Trial:
    """Start a server with the settings, send the load, stop it."""
    began, ready, error, samples = time.perf_counter(), 0.0, None, None
    file = out / "trial.toml"
    write_atomic(file, _toml(options_of(point)))
    try:
        with start(task.model, "--config", str(file)) as url:
            ready = time.perf_counter() - began
            row, answers = run_load(connect(Server(url), None, task.load.seed), replace(task.load, requests=requests))
        done = [a for a in answers if a.error is None and a.times]
        samples = (
            Samples(
                ttft_s=tuple(a.times[0] - a.asked for a in done),
                tpot_s=tuple((a.times[-1] - a.times[0]) / max(1, a.output_tokens - 1) for a in done),
                duration_s=row["duration"],
                failed=row["failed"],
            )
            if done
            else None
        )
        error = None if done else (row["errors"] or ["no request was answered"])[0]
    except BaguError as problem:  # these settings do not work on this machine; the search goes on without them
        error = str(problem)
    took = time.perf_counter() - began
    result = f"{samples.goodput(task.limits):.2f} requests/s within the limits" if samples else f"failed: {error}"
    console.print(Text(f"{label(point)}, {requests} requests: {result}, {took:.1f} s", style="dim"))
    return Trial(point=point, requests=requests, samples=samples, seconds=took, start_s=ready or took, error=error)


def _show(task: Task, found: Found, console: Console) -> None:
    """Prediction beside measurement for every measured point, best first."""
    measured: dict[Point, Trial] = {}
    for trial in found.trials:
        if trial.point not in measured or trial.requests >= measured[trial.point].requests:
            measured[trial.point] = trial
    first = found.trials[0].point
    lines = []
    for point, trial in sorted(measured.items(), key=lambda item: -_goodput(item[1], task)):
        before = task.predict(point, trial.requests)
        cells = [f"{before.goodput(task.limits):.2f}", f"{found.corrected[point]:.2f}"]
        cells += [f"{_goodput(trial, task):.2f}" if trial.samples else "failed"]
        cells += [f"{_ms(before.ttft_s)} → {_ms(trial.samples.ttft_s)}" if trial.samples else "–"]
        cells += [f"{_ms(before.tpot_s)} → {_ms(trial.samples.tpot_s)}" if trial.samples else "–"]
        lines.append((label(point) + (" (baseline)" if point == first else ""), *cells, str(trial.requests)))
    heads = (
        "requests/s within the limits",
        "roofline",
        "corrected",
        "measured",
        "TTFT p50 ms",
        "TPOT p50 ms",
        "requests",
    )
    console.print(table("predicted → measured", heads, lines))
    console.print(
        f"{len(found.trials)} measurements of {len(measured)} of {len(task.points)} points in {found.seconds:.0f} s; "
        f"measuring every point would take about {found.grid_s:.0f} s ({found.seconds / found.grid_s:.0%})"
    )
    for trial in (t for t in measured.values() if t.error):
        console.print(Text(f"{label(trial.point)} does not run: {trial.error}", style="yellow"))
    if dict(found.best).get("quantization"):
        exact = [t for t in measured.values() if not dict(t.point).get("quantization") and t.samples]
        top = max(exact, key=lambda t: _goodput(t, task), default=None)
        if top is not None:
            console.print(
                f"quantization changes the outputs; best without: {label(top.point)}, {_goodput(top, task):.2f}"
            )


def _goodput(trial: Trial, task: Task) -> float:
    return trial.samples.goodput(task.limits) if trial.samples else 0.0


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * sorted(seconds)[len(seconds) // 2]:,.1f}"


def _toml(options: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in options.items())


def _config(task: Task, found: Found, best: Trial) -> str:
    limits = ", ".join(f"{name.upper()} {ms:g} ms" for name, ms in task.limits.items())
    first = found.trials[0]
    return (
        f"# bagu serve MODEL --config FILE; written by bagu tune serve for {Path(task.model).name}\n"
        f"# {task.load}: {_goodput(best, task):.2f} requests/s within {limits}; "
        f"{label(first.point)}: {_goodput(first, task):.2f}\n"
    ) + _toml(options_of(found.best))
