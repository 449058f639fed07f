"""Save while training continues: one writer thread, at most one checkpoint in flight, and every failure is reported.

A save that fails (a full disk) does not stop the run, because stopping would lose more than continuing: the loop
records it and the next save tries again. The last save of a run must succeed, and raises if it fails.
"""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bagu.train.checkpoint import CheckpointError, Snapshot, clear_partial, unneeded, write


@dataclass(frozen=True, kw_only=True)
class Saved:
    """The result of a save: its `path`, or an `error`; neither for a part that rank 0 puts into its checkpoint."""

    step: int
    seconds: float
    path: Path | None
    error: CheckpointError | None


class Saver:
    """Writes snapshots to `folder`; keeps the last few and the best. Nothing changes there before the first call."""

    def __init__(self, folder: Path, *, keep_last: int, keep_best: bool) -> None:
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bagu-save")
        self._inflight: Future[Saved] | None = None
        self._done: list[Saved] = []

    def clear_partial(self) -> None:
        """Remove the incomplete checkpoint of a killed run."""
        clear_partial(self.folder)

    def save(self, take: Callable[[], Snapshot]) -> None:
        """Take a snapshot and start to write it; waits first for the previous one, so that memory holds only one."""
        self.wait()
        self._inflight = self._pool.submit(self._write, take())

    def wait(self) -> None:
        """Wait until no save is in flight."""
        if self._inflight is not None:
            self._done.append(self._inflight.result())
            self._inflight = None

    def finished(self) -> list[Saved]:
        """The saves that finished since the last call, in order."""
        if self._inflight is not None and self._inflight.done():
            self.wait()
        done, self._done = self._done, []
        return done

    def close(self) -> None:
        """Wait for the writer and stop it; `finished` still returns the result of the last save."""
        self.wait()
        self._pool.shutdown()

    def _write(self, snap: Snapshot) -> Saved:
        start = time.perf_counter()
        path, error = None, None
        try:
            path = write(self.folder, snap)
            for old in (
                () if path is None else unneeded(self.folder, keep_last=self.keep_last, keep_best=self.keep_best)
            ):
                shutil.rmtree(old)
        except CheckpointError as caught:
            error = caught
        except OSError as caught:  # deleting an old checkpoint failed: the new one exists, but the disk fills up
            error = CheckpointError(f"an old checkpoint cannot be removed: {caught}", hint=f"look at {self.folder}")
        return Saved(step=snap.step, seconds=time.perf_counter() - start, path=path, error=error)
