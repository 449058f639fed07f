"""The caller's side of the sandbox."""

import itertools
import os
import queue
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Literal, Self, get_args

from bagu.errors import BackendError
from bagu.machine.cores import available_cores
from bagu.machine.sandbox.protocol import Limits, Result, read_frame, write_frame

Isolation = Literal["namespaces", "landlock", "landlock-weak"]
SETTING = "BAGU_SANDBOX"  # the kinds of isolation to try, separated by commas
PACKAGE = Path(__file__).parents[3]
START = (
    "import sys; sys.path.append(sys.argv[1]); from bagu.machine.sandbox.zygote import main; "
    "main(int(sys.argv[2]), sys.argv[3:])"
)
_numbers = itertools.count()


class SandboxUnavailable(BackendError):
    """This system has no supported way to isolate untrusted code."""


class Sandbox:
    """Runs Python code in isolated processes, `workers` at a time. Close it, or use it in a `with`.

    `isolation` lists the kinds to try, in order; without it the setting BAGU_SANDBOX does, and without that it is
    namespaces, then Landlock. `landlock-weak`, which cannot keep every promise, must be asked for by name.
    If the process of a worker has died, the next run restarts it.
    """

    def __init__(
        self, *, workers: int | None = None, limits: Limits | None = None, isolation: Sequence[Isolation] | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.workers = workers or available_cores()
        self._kinds = _asked() if isolation is None else tuple(isolation)
        if sys.platform != "linux":
            raise SandboxUnavailable(
                f"code that a model wrote is run on Linux alone, and this is {sys.platform}",
                hint="scores that only parse the code need no sandbox",
            )
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        first = _Worker(self._kinds)
        self.isolation: Isolation = first.isolation
        self._all = [first, *(_Worker(self._kinds) for _ in range(self.workers - 1))]
        for worker in self._all:
            self._idle.put(worker)

    def run(self, code: str, limits: Limits | None = None) -> Result:
        """Execute `code` as a program and wait for its end. This method is thread-safe."""
        worker = self._idle.get()
        try:
            return worker.run(code, limits or self.limits)
        finally:
            self._idle.put(worker)

    def run_all(self, codes: Iterable[str]) -> list[Result]:
        """Run the programs, as many at once as there are workers, and return the results in order."""
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self.run, codes))

    def close(self) -> None:
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _asked() -> tuple[Isolation, ...]:
    names = os.environ.get(SETTING, "namespaces,landlock").split(",")
    known: dict[str, Isolation] = {kind: kind for kind in get_args(Isolation)}
    if not known.keys() >= set(names):
        raise BackendError(f"{SETTING} is {','.join(names)!r}", hint=f"name one or more of {','.join(known)}")
    return tuple(known[name] for name in names)


class _Worker:
    def __init__(self, kinds: Sequence[Isolation]) -> None:
        self._kinds, self._number = kinds, next(_numbers) + 64 * (os.getpid() % 4096)
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", START, str(PACKAGE), str(self._number), *self._kinds]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={}, cwd="/", close_fds=True
        )
        said = read_frame(self._process.stdout)  # type: ignore[arg-type]
        if said["isolation"] is None:
            self.close()
            raise SandboxUnavailable(
                f"this system permits no isolation of code that a model wrote ({'; '.join(said['problems'])})",
                hint="allow user namespaces, or use a kernel with Landlock; scores that only parse need no sandbox",
            )
        self.isolation: Isolation = said["isolation"]

    def run(self, code: str, limits: Limits) -> Result:
        if self._process.poll() is not None:
            self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        write_frame(self._process.stdin, {"code": code, "limits": asdict(limits)})  # type: ignore[arg-type]
        return Result(**read_frame(self._process.stdout))  # type: ignore[arg-type]

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()
