"""The entry point of the engine process. It imports torch (2 s of CPU time) only where it is needed.

With `background`, importing, loading and warming up run in a thread of the lowest priority, so that they take only the
time that the engines in service leave. The main thread keeps its priority and serves afterwards. On Linux the niceness
belongs to a thread, and threads inherit it from the one that starts them. A process without privileges cannot lower
its niceness again, so the niceness of the whole process would stay at 19.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from bagu.serve.config import EngineConfig
    from bagu.serve.http.pipe import Load

__all__ = ["at_low_priority", "engine_main"]

LOWEST = 19
T = TypeVar("T")


def engine_main(
    ours: socket.socket, load: Load, config: EngineConfig, load_draft: Load | None, background: bool
) -> None:
    """Run the engine process (worker.py)."""
    if not background:
        from bagu.serve.http.worker import run

        run(ours, load, config, load_draft)
        return
    at_low_priority(_import_worker)
    from bagu.serve.http.worker import run

    run(ours, load, config, load_draft, at_low_priority)


def at_low_priority(function: Callable[[], T]) -> T:
    """Call `function` in a thread of the lowest priority. On other systems than Linux it has the normal priority."""
    with ThreadPoolExecutor(1, initializer=_lower_priority) as thread:
        return thread.submit(function).result()


def _lower_priority() -> None:
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, LOWEST)  # 0 is the calling thread


def _import_worker() -> None:
    import bagu.serve.http.worker  # noqa: F401
