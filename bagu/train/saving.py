"""Saving while training goes on: one writer thread, at most one checkpoint in flight, nothing lost in silence.

A save that fails (a full disk) does not stop the run, since stopping would lose more than going on: the loop records it
and the next save tries again. The last save of a run must succeed, and raises when it does not.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bagu.train.checkpoint import CheckpointError, Snapshot, clear_partial, unneeded, write

__all__ = ["Saved", "Saver"]


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended: `path` where it lies, or `error`."""

    step: int
    seconds: float
    path: Path | None
    error: CheckpointError | None


class Saver:
    """Writes snapshots to `folder`, keeping the last few and the best. Nothing changes there before the first call."""

    def __init__(self, folder: Path, *, keep_last: int, keep_best: bool) -> None:
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bagu-save")
        self._inflight: Future[Saved] | None = None
        self._done: list[Saved] = []

    def clear_partial(self) -> None:
        """Remove what a killed run was writing."""
        clear_partial(self.folder)

    def save(self, take: Callable[[], Snapshot]) -> None:
        """Take a snapshot and begin to write it; waits first for the one before, so that memory never holds two."""
        self.wait()
        self._inflight = self._pool.submit(self._write, take())

    def wait(self) -> None:
        """Until nothing is in flight."""
        if self._inflight is not None:
            self._done.append(self._inflight.result())
            self._inflight = None

    def finished(self) -> list[Saved]:
        """The saves that ended since this was last asked, in order."""
        if self._inflight is not None and self._inflight.done():
            self.wait()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Wait for the writer and end it; `finished` still tells how the last save ended."""
        self.wait()
        self._pool.shutdown()

    def _write(self, snap: Snapshot) -> Saved:
        start = time.perf_counter()
        path, error = None, None
        try:
            path = write(self.folder, snap)
            for old in unneeded(self.folder, keep_last=self.keep_last, keep_best=self.keep_best):
                shutil.rmtree(old)
        except CheckpointError as caught:
            error = caught
        except OSError as caught:  # an old one that cannot be deleted: the new one is there, and the disk will fill
            error = CheckpointError(f"an old checkpoint cannot be removed: {caught}", hint=f"look at {self.folder}")
        return Saved(step=snap.step, seconds=time.perf_counter() - start, path=path, error=error)
