"""Python processes of tests, forked from one that has imported torch: a start costs 0.1 s of CPU time, not 2 to 4.

Inside `with starts():`, `subprocess` and multiprocessing's spawn send a command `python -c CODE`, `python -m MODULE` or
`python FILE` to a nursery, a process that this one has started. It forks twice, and the grandchild becomes a child of
this process, which is a subreaper for that moment: pids, exit codes, pipes and signals are those of a real start. The
forked process has a nursery of its own, so that the engine that a server starts costs as little.

Started for real are other programs, Python with options, and Python with another environment where imports read it.
Tests of how a process starts (its imports, its memory) do not use this.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.forkserver
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRELOADED = (
    "pytest", "torch", "torch._dynamo", "torch.distributed.tensor", "torch.distributed.pipelining",
    "uvicorn", "fastapi", "bagu.train.loop", "bagu.recipes.command", "bagu.serve.worker.run", "bagu.serve.http.server",
    "bagu.serve.http.api", "bagu.parallel.server.rules", "bagu.parallel.server.processes", "bagu.data.chat",
)  # fmt: skip
# What is read when a program is loaded: a process where one of these differs is started for real.
READ_AT_START = ("OMP_", "KMP_", "MKL_", "TRITON", "PYTHON", "LD_", "CUDA")
READ_LATER = ("PYTHONPATH", "PYTHONBREAKPOINT")  # Ray sets the second one: nothing was forked after its tests
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
SPAWNED = "spawned"  # the name of a process that multiprocessing has started
HIGH = 500  # file descriptors are moved above this before they get their numbers

fork_exec = _posixsubprocess.fork_exec


@dataclass(frozen=True)
class Job:
    """A command, and what its process has. `fds` are the numbers of the file descriptors that come with it."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    cores: Sequence[int]
    new_session: bool
    fds: Sequence[int]

    def run(self) -> None:
        """The program, in this process, as `__main__`."""
        first, *rest = self.argv
        sys.path[1:1] = [p for p in self.env.get("PYTHONPATH", "").split(os.pathsep) if p and p not in sys.path]
        if first == "-m":
            sys.argv, sys.path[0] = rest, self.cwd
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            return
        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        if first == "-c":
            sys.argv, sys.path[0], source, name = ["-c", *rest[1:]], "", rest[0], "<string>"
        else:
            sys.argv, sys.path[0], name = [*self.argv], str(Path(first).resolve().parent), first
            main.__file__ = first
            source = Path(first).read_text(encoding="utf-8")
        exec(compile(source, name, "exec"), main.__dict__)


class Nursery:
    """Asks a nursery for processes."""

    def __init__(self, connection: socket.socket, environment: Mapping[str, str]) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._environment, self._pid = _read_at_start(environment), os.getpid()

    def fork_exec(self, argv: Sequence[Any], programs: Any, close_fds: bool, fds: Sequence[int], *more: Any) -> int:
        """As `_posixsubprocess.fork_exec`, which `subprocess` and multiprocessing's spawn call; the pid."""
        cwd, env, stdin, _, _, stdout, _, stderr, _, errors, _, new_session = more[:12]
        words = [os.fsdecode(word) for word in argv]
        given = os.environ if env is None else dict(map(os.fsdecode, pair.split(b"=", 1)) for pair in env)
        if not close_fds or not self._can_run(words, given):
            return fork_exec(argv, programs, close_fds, fds, *more)
        kept = [fd for fd in fds if fd != errors and fd > 2]
        theirs = [own if fd < 0 else fd for own, fd in enumerate((stdin, stdout, stderr))] + kept
        folder = str(Path.cwd() if cwd is None else Path(os.fsdecode(cwd)).resolve())
        job = Job(words[1:], folder, dict(given), sorted(os.sched_getaffinity(0)), bool(new_session), [0, 1, 2, *kept])
        with self._lock:
            _subreaper(True)
            try:
                _send(self._connection, job, theirs)
                (pid,) = struct.unpack("i", _receive(self._connection, 4))
            finally:
                _subreaper(False)
        return int(pid)

    def _can_run(self, words: Sequence[str], env: Mapping[str, str]) -> bool:
        python = len(words) > 1 and words[0] == sys.executable
        return (
            python and os.getpid() == self._pid and (words[1] in ("-c", "-m") or not words[1].startswith("-"))
            and _read_at_start(env) == self._environment
        )  # fmt: skip


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {n: value for n, value in env.items() if n.startswith(READ_AT_START) and n not in READ_LATER}


_here: Nursery | None = None
_at_start: Mapping[str, str] = {}  # the environment before any test has changed it


def remember_environment() -> None:
    """Give the first nursery the environment of now. A test that needs one first may have changed a variable that is
    read at start, and no later process would have the same."""
    global _at_start
    _at_start = dict(os.environ)


@contextlib.contextmanager
def starts() -> Iterator[None]:
    """Where processes are forked from a nursery. The first one of a process takes the time of the imports."""
    global _here
    if _here is None:
        ours, theirs = socket.socketpair()
        environment = _at_start or os.environ
        subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            start_new_session=True, env=environment,
        )  # fmt: skip
        theirs.close()
        _here = Nursery(ours, environment)
    before = subprocess._fork_exec, _posixsubprocess.fork_exec  # type: ignore[attr-defined]
    _install(_here.fork_exec)
    try:
        yield
    finally:
        subprocess._fork_exec, _posixsubprocess.fork_exec = before  # type: ignore[attr-defined]


def fork_server() -> Any:
    """The context of multiprocessing's fork server. It is forked from the nursery, and so has imported torch."""
    context = multiprocessing.get_context("forkserver")
    with starts():
        multiprocessing.forkserver.ensure_running()
    return context


def is_spawned(pid: int) -> bool:
    """Whether multiprocessing has started the process."""
    folder = Path(f"/proc/{pid}")
    return b"spawn_main" in (folder / "cmdline").read_bytes() or (folder / "comm").read_text().strip() == SPAWNED


def _install(function: Any) -> None:
    subprocess._fork_exec = _posixsubprocess.fork_exec = function  # type: ignore[attr-defined]


def _subreaper(on: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _name(name: str) -> None:
    """As in /proc/PID/comm: the command line is that of the first nursery."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def _send(connection: socket.socket, job: Job, fds: Sequence[int]) -> None:
    data = json.dumps(vars(job)).encode("utf-8", "surrogateescape")
    socket.send_fds(connection, [struct.pack("q", len(data))], fds)
    connection.sendall(data)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def serve(connection: socket.socket) -> Job | None:
    """Fork a process for every job. Returns the job in the forked process, and None when nobody asks any more."""
    while True:
        head, fds, _, _ = socket.recv_fds(connection, 8, 64)
        if len(head) < 8:
            return None
        data = _receive(connection, *struct.unpack("q", head))
        if (job := _forked(connection, Job(**json.loads(data.decode("utf-8", "surrogateescape"))), fds)) is not None:
            return job
        for fd in fds:
            os.close(fd)


def _forked(connection: socket.socket, job: Job, fds: Sequence[int]) -> Job | None:
    """The job in the forked process, None in this one, where its pid was sent when it had its new parent."""
    answer, question = os.pipe()
    if (between := os.fork()) == 0:
        if pid := os.fork():
            os.write(question, struct.pack("i", pid))
            os._exit(0)
        os.close(answer)
        os.close(question)
        connection.close()
        return _entered(job, fds)
    os.waitpid(between, 0)
    connection.sendall(os.read(answer, 4))
    os.close(answer)
    os.close(question)
    return None


def _entered(job: Job, fds: Sequence[int]) -> Job:
    """Set up the forked process, and its own nursery, in whose processes this returns their jobs."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in fds]
    for fd in fds:
        os.close(fd)
    if job.new_session:
        os.setsid()
    ours, theirs = map(_moved, socket.socketpair())
    if os.fork() == 0:
        for fd in high:
            os.close(fd)
        ours.close()
        _name("nursery")
        if (job_of_child := serve(theirs)) is None:
            os._exit(0)
        return job_of_child
    theirs.close()
    _name(SPAWNED if "--multiprocessing-fork" in job.argv else "python")
    for fd, number in zip(high, job.fds, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(job.cwd)
    os.sched_setaffinity(0, job.cores)
    os.environ.clear()
    os.environ.update(job.env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nursery = Nursery(ours, os.environ)
    _install(nursery.fork_exec)
    return job


def _moved(connection: socket.socket) -> socket.socket:
    """With a number that no job asks for."""
    with connection:
        return socket.socket(fileno=fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD, HIGH))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[0] = ""
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):  # a machine for GPU tests has no web server
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if (job := serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        try:
            job.run()
            _end(0)
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            _end(end.code if isinstance(end.code, int) else int(end.code is not None))
        except Exception:
            traceback.print_exc()
            _end(1)


def _end(status: int) -> None:
    """End as the interpreter does, but leave the modules to the kernel: 0.4 s of CPU time."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
