"""The parts that `bagu bench ops | train | engine | serve` share: results, output, timing, and peers that are scripts.

rows = Rows(out, default=RESULTS, as_json=as_json)   # raises before the measurement if the folder is not writable
rows.add([...])                                      # appended to this machine's results file at once
rows.finish(table(...))                              # JSON on stdout, or the table
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import RenderableType
from rich.table import Table

from bagu.bench.options import BenchSetting
from bagu.errors import BaguError, UnknownName
from bagu.machine.device import named_device, named_dtype
from bagu.machine.environment import environment
from bagu.machine.fast_dtype import compute_dtype
from bagu.machine.terminal import Terminal
from bagu.machine.timing import reset_device
from bagu.runs.record import append_rows, record_file

RESULTS = Path("benchmarks/results")

LONG_WORD = 24  # characters that a column of a table has room for; names of GPU kernels may be longer

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The device and dtype of a benchmark."""

    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, setting: BenchSetting) -> Place:
        device = named_device(setting.device)
        return cls(device=device, dtype=named_dtype(setting.dtype) if setting.dtype else compute_dtype(device))

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def facts(self) -> dict[str, str]:
        """What a row says of them."""
        return {"device": str(self.device), "dtype": str(self.dtype).removeprefix("torch.")}


class Rows:
    """The rows of one run. Each gets the environment and is written before the next measurement starts.

    `out` is the folder of results, by default `default`; without both, nothing is written.
    """

    @classmethod
    def of(cls, setting: BenchSetting, results: str) -> Rows:
        """Those of a command, in RESULTS/`results` by default."""
        return cls(setting.out, default=RESULTS / results, as_json=setting.as_json)

    def __init__(self, out: Path | None, *, default: Path | None, as_json: bool) -> None:
        folder = out or default
        self.record = None if folder is None else record_file(folder)
        self.as_json, self.env = as_json, environment()
        self.all: list[Row] = []
        self.console = Terminal(stderr=as_json, highlight=False)  # stdout has only the JSON

    def add(self, rows: Iterable[Mapping[str, Any]]) -> list[Row]:
        made = [{**row, "env": self.env} for row in rows]
        if self.record is not None:
            append_rows(self.record, made)
        self.all += made
        return made

    def finish(self, *shown: RenderableType, single: bool = False) -> None:
        """Print the rows as JSON on stdout if requested (a `single` row without a list), else `shown`."""
        if self.as_json:
            print(json.dumps(self.all[0] if single else self.all, ensure_ascii=False, allow_nan=False))
            return
        for part in shown:
            self.show(part)

    def show(self, part: RenderableType) -> None:
        """Print a part without cutting off columns, which rich does with a table that is wider than the console."""
        self.console.print(part, crop=False)


def table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is text; the others are numbers, without the columns that have none (all "–")."""
    found = list(lines)
    made = Table(title=title, title_justify="left")
    kept = [i for i in range(len(heads)) if not found or any(line[i] != "–" for line in found)]
    for i in kept:
        longest = max(len(word) for line in (heads, *found) for word in line[i].split() or [""])
        made.add_column(heads[i], justify="right" if i else "left", min_width=min(longest, LONG_WORD))
    for line in found:
        made.add_row(*(line[i] for i in kept))
    return made


def plain(heads: Sequence[str], lines: Iterable[Sequence[str]], *, right: Collection[str] = ()) -> Table:
    """A table without lines; the columns `right` are aligned to the right."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for head in heads:
        made.add_column(head, justify="right" if head in right else "left", overflow="fold")
    for line in lines:
        made.add_row(*line)
    return made


def shown(value: float | None, form: str) -> str:
    """A cell of a table."""
    return "–" if value is None else form.format(value)


class StepTimes(NamedTuple):
    seconds: list[float]
    peak_bytes: int | None  # of the device's memory; None on a CPU


def time_steps(
    create: Callable[[], AbstractContextManager[Callable[[], float]]], device: torch.device, *, steps: int
) -> StepTimes:
    """Time the step of one implementation, on a device that holds nothing of the implementation before it.

    Only this function refers to the step. If the caller did, its model and optimizer state would still be allocated
    while the next implementation is created, and would count in the peak of that one.
    """
    reset_device(device)
    with create() as step:
        seconds = _step_seconds(step, device, steps=steps)
    return StepTimes(seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None)


def _step_seconds(step: Callable[[], float], device: torch.device, *, steps: int, warmup: int = 3) -> list[float]:
    """Seconds of each of `steps` calls after the warmup, with the device idle at both ends. A step returns its loss."""
    samples = []
    for i in range(warmup + steps):
        _wait(device)
        start = time.perf_counter()
        loss = step()
        _wait(device)
        samples.append(time.perf_counter() - start)
        if not loss < float("inf"):
            raise BaguError(f"the loss of step {i} is {loss}", hint="correct the run: its speed is meaningless")
    return samples[warmup:]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_peers(peers: Sequence[str], known: Iterable[str]) -> None:
    """A peer must be a known name or the path of a script."""
    names = list(known)
    unknown = [p for p in peers if p not in names and not Path(p).is_file()]
    if unknown:
        raise UnknownName.among("peer", unknown[0], [*names, "PATH.py"])


def script_rates(path: Path, environ: Mapping[str, str] | None = None, arguments: Sequence[str] = ()) -> list[Row]:
    """Run a peer's script, unmodified, in `environ` or the environment of this process. Return the JSON lines it prints
    that have `tokens_per_s`."""
    command = [sys.executable, str(path), *arguments]
    run = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    found = []
    for line in run.stdout.splitlines():
        try:
            row = json.loads(line)
            float(row["tokens_per_s"])
        except (ValueError, KeyError, TypeError):
            continue
        found.append(row)
    if run.returncode or not found:
        last = (run.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise BaguError(
            f"{path} (exit status {run.returncode}) printed {len(found)} JSON lines with tokens_per_s: {last}"
        )
    return found
