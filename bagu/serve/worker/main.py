"""The entry point of the engine process. It imports torch (2 s of CPU time) only where it is needed.

With a `niceness`, importing, loading and warming up run in a thread of low priority, so that they disturb the engines
in service little. The main thread keeps its priority and serves afterwards. On Linux the niceness belongs to a thread,
and threads inherit it from the one that starts them. A process without privileges cannot lower its niceness again, so
the niceness of the whole process would stay.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from bagu.serve.config import EngineConfig
    from bagu.serve.wire.messages import Load

T = TypeVar("T")


def engine_main(ours: socket.socket, load: Load, config: EngineConfig, load_draft: Load | None, niceness: int) -> None:
    """Run the engine process (run.py)."""
    if config.cores is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, config.cores)  # before torch counts them
    if niceness == 0:
        from bagu.serve.worker.run import run

        run(ours, load, config, load_draft)
        return
    at_niceness(niceness, _import_worker)
    from bagu.serve.worker.run import run

    run(ours, load, config, load_draft, partial(at_niceness, niceness))


def at_niceness(niceness: int, function: Callable[[], T]) -> T:
    """Call `function` in a thread with a niceness of at least this. On other systems than Linux it has the normal
    priority."""
    with ThreadPoolExecutor(1, initializer=_set_niceness, initargs=(niceness,)) as thread:
        return thread.submit(function).result()


def _set_niceness(niceness: int) -> None:
    if sys.platform == "linux":  # 0 is the calling thread
        os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))


def _import_worker() -> None:
    import bagu.serve.worker.run  # noqa: F401
