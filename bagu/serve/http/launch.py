"""Starting the engine process: on this machine by default; serve/replicas/on_ray.py starts it on a cluster.

The two processes talk over a socket (wire/), so nothing else depends on where the engine runs.
"""

import multiprocessing
import signal
import socket
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import NamedTuple, Protocol

from bagu.serve.config import EngineConfig
from bagu.serve.wire.messages import Load
from bagu.serve.worker.main import engine_main


class EngineStart(NamedTuple):
    """What an engine process is started with, after its socket: the arguments of `engine_main`."""

    load: Load
    config: EngineConfig
    load_draft: Load | None
    niceness: int


class LaunchedEngine(Protocol):
    """A started engine process."""

    connection: socket.socket
    pid: int

    def kill(self) -> None:
        """End it at once; does not wait."""

    def join(self, timeout: float) -> None:
        """Wait for the end, at most this long; called in a thread."""

    @property
    def exit_code(self) -> int | None: ...


# called in a thread, with a function that says whether the server is stopping; raises BaguError if it cannot be started
Launch = Callable[[EngineStart, Callable[[], bool]], LaunchedEngine]


class LocalEngine:
    """An engine process of this machine; a `Launch`."""

    def __init__(self, start: EngineStart, stopping: Callable[[], bool]) -> None:
        spawn = multiprocessing.get_context("spawn")  # CUDA and OpenMP do not work after a fork
        self.connection, theirs = socket.socketpair()
        self._process = spawn.Process(target=engine_main, args=(theirs, *start), name="bagu-engine", daemon=True)
        # a terminal sends Ctrl-C to all processes: while this one imports, it would print a traceback
        resource_tracker.ensure_running()  # `start` would run it, and that unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float) -> None:
        self._process.join(timeout)

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode
