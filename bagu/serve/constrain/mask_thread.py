"""A thread that computes masks while the engine's thread works on.

A thread that is started waits for the GIL, and the other one gives it up only where it waits, or after 5 ms. So the
engine's thread waits until this one runs, and goes on when the task releases the GIL, which it should do at once.
"""

import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from threading import Thread

Task = Callable[[], float]  # returns the seconds that it took


class MaskThread:
    """Runs tasks one after another, in the order of `start`."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Task, bool] | None] = SimpleQueue()
        self._began: SimpleQueue[None] = SimpleQueue()
        self._ended: SimpleQueue[float | BaseException] = SimpleQueue()
        self._started = self._waited = 0  # tasks
        queues = self._tasks, self._began, self._ended
        Thread(target=_run, args=queues, name="masks", daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)  # ends the thread

    def start(self, task: Task) -> Callable[[], float]:
        """Call a task in the thread, and return a function that waits for it: it returns the seconds of the tasks that
        were not waited for before, and raises what they have raised. If all earlier tasks were waited for, `start`
        returns when this one has released the GIL, or ended."""
        idle = self._started == self._waited
        self._tasks.put((task, idle))
        if idle:
            self._began.get()
        self._started += 1
        return partial(self._wait, self._started)

    def _wait(self, number: int) -> float:
        """Wait until the task of this number, and those before it, have ended."""
        seconds = 0.0
        while self._waited < number:
            found = self._ended.get()
            self._waited += 1
            if isinstance(found, BaseException):
                raise found
            seconds += found
        return seconds


def _run(
    tasks: SimpleQueue[tuple[Task, bool] | None], began: SimpleQueue[None], ended: SimpleQueue[float | BaseException]
) -> None:
    while (found := tasks.get()) is not None:
        task, reports = found
        if reports:
            began.put(None)
        try:
            ended.put(task())
        except BaseException as error:  # raised in the engine's thread
            ended.put(error)
        del task, found  # they refer to the engine
