"""Heartbeats: each rank writes how far it is, so that a watchdog can name the one that hangs.

Ranks that wait for a hanging one are all inside a collective, and make no progress either. The hanging
rank is the one that has started the fewest collectives.
"""

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = "BAGU_HEARTBEATS"  # the variable by which the launcher names the folder
EVERY_S = 1.0
SILENT_S = 30.0  # without a beat: the process as a whole does not run; on a busy machine a beat may be late


@dataclass(frozen=True, kw_only=True)
class Beat:
    """How far a rank is: `progress` grows with every collective, `step` is the step it works on."""

    rank: int
    pid: int
    progress: int
    step: int
    time: float  # seconds since the epoch: when it was written


class Heartbeat:
    """A thread that writes this rank's beat every second, and ends the process when its launcher has died.

    `read` returns (progress, step).
    """

    def __init__(self, folder: Path, rank: int, read: Callable[[], tuple[int, int]]) -> None:
        self.path, self.rank, self.read = folder / f"rank-{rank}.json", rank, read
        self._parent = os.getppid()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bagu-heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        draft = self.path.with_suffix(".tmp")
        while True:
            progress, step = self.read()
            beat = {"rank": self.rank, "pid": os.getpid(), "progress": progress, "step": step, "time": time.time()}
            try:
                draft.write_text(json.dumps(beat), encoding="utf-8")
                draft.replace(self.path)
            except FileNotFoundError:  # the launcher is removing its folder
                return
            if os.getppid() != self._parent:  # the launcher was killed: do not stay behind
                os._exit(1)
            if self._stop.wait(EVERY_S):
                return


def read_beats(folder: Path) -> list[Beat]:
    """The last beat of every rank that has written one, by rank."""
    beats = [Beat(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank-*.json")]
    return sorted(beats, key=lambda b: b.rank)


def stuck_ranks(beats: list[Beat], now: float) -> list[int]:
    """The ranks that the others wait for: those that stopped writing, else those with the least progress."""
    silent = [b.rank for b in beats if now - b.time > SILENT_S]
    if silent and len(silent) < len(beats):
        return silent
    least = min(b.progress for b in beats)
    return [b.rank for b in beats if b.progress == least]
