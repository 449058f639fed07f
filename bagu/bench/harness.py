"""What `bagu bench ops | train | engine | serve` share: the record, the output, the clock, and peers that are scripts.

rows = Rows(out, default=RESULTS, as_json=as_json)   # refuses a folder that cannot be written before measuring
rows.add([...])                                      # appended to this machine's record at once
rows.finish(table(...))                              # JSON on stdout, or the table
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.table import Table

from bagu.errors import BaguError, UnknownName
from bagu.machine.environment import environment
from bagu.runs.record import append_rows, record_file

__all__ = ["RESULTS", "Rows", "check_peers", "script_rates", "step_seconds", "table"]

RESULTS = Path("benchmarks/results")

Row = dict[str, Any]


class Rows:
    """The rows of one run. Each gets the environment, and is in the record before the next is measured.

    `out` is the folder of the record; without it `default` is, and without both nothing is recorded.
    """

    def __init__(self, out: Path | None, *, default: Path | None, as_json: bool) -> None:
        folder = out or default
        self.record = None if folder is None else record_file(folder)
        self.as_json, self.env = as_json, environment()
        self.all: list[Row] = []
        self.console = Console(stderr=as_json, highlight=False)  # stdout is for the JSON alone

    def add(self, rows: Iterable[Mapping[str, Any]]) -> list[Row]:
        made = [{**row, "env": self.env} for row in rows]
        if self.record is not None:
            append_rows(self.record, made)
        self.all += made
        return made

    def finish(self, *shown: RenderableType, single: bool = False) -> None:
        """The rows as JSON on stdout where that was asked for (a `single` one not as a list), else `shown`."""
        if self.as_json:
            print(json.dumps(self.all[0] if single else self.all, ensure_ascii=False, allow_nan=False))
            return
        for part in shown:
            self.console.print(part)


def table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers."""
    made = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        made.add_column(head, justify="right" if i else "left", min_width=min(len(head), 9))
    for line in lines:
        made.add_row(*line)
    return made


def step_seconds(step: Callable[[], float], device: torch.device, *, steps: int, warmup: int = 3) -> list[float]:
    """Seconds of each of `steps` calls after the warm-up, the device idle at both ends. A step returns its loss."""
    samples = []
    for i in range(warmup + steps):
        _wait(device)
        start = time.perf_counter()
        loss = step()
        _wait(device)
        samples.append(time.perf_counter() - start)
        if not loss < float("inf"):
            raise BaguError(f"the loss of step {i} is {loss}", hint="a benchmark of a broken run means nothing")
    return samples[warmup:]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def check_peers(peers: Sequence[str], known: Iterable[str]) -> None:
    """A peer is a known name or the path of a script."""
    names = list(known)
    unknown = [p for p in peers if p not in names and not Path(p).is_file()]
    if unknown:
        raise UnknownName.among("peer", unknown[0], [*names, "PATH.py"])


def script_rates(path: Path, environ: Mapping[str, str] | None = None) -> list[Row]:
    """Run a peer's own script, unmodified, in `environ` or in this process's environment; every line of JSON with
    `tokens_per_s` that it prints."""
    run = subprocess.run([sys.executable, str(path)], env=environ, capture_output=True, text=True, check=False)
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
