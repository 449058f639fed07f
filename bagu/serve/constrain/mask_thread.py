"""A thread that computes masks while the engine's thread works on.

A thread that is started waits for the GIL, and the other one gives it up only where it waits, or after 5 ms. So the
engine's thread waits until this one runs, and goes on when the task releases the GIL, which it should do at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

__all__ = ["MaskThread"]

Task = Callable[[], float]


class MaskThread:
    """Runs one task at a time: call `result` before the next `start`."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._began: SimpleQueue[None] = SimpleQueue()
        self._results: SimpleQueue[float | BaseException] = SimpleQueue()
        queues = self._tasks, self._began, self._results
        Thread(target=_run, args=queues, name="masks", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)  # ends the thread

    def start(self, task: Task) -> None:
        """Call a task in the thread. Returns when it has released the GIL, or ended."""
        self._tasks.put(task)
        self._began.get()

    def result(self) -> float:
        """What the task has returned; raises what it has raised."""
        found = self._results.get()
        if isinstance(found, BaseException):
            raise found
        return found


def _run(
    tasks: SimpleQueue[Task | None], began: SimpleQueue[None], results: SimpleQueue[float | BaseException]
) -> None:
    while (task := tasks.get()) is not None:
        began.put(None)
        try:
            results.put(task())
        except BaseException as error:  # raised in the engine's thread
            results.put(error)
        del task  # it refers to the engine
