"""A helper process that runs programs: it forks a child for each one, which avoids starting an interpreter.

A program has two processes: a supervisor, which waits, enforces the time limit and collects the output, and the
program's first process, which drops its rights and then executes the code. The helper is single-threaded.

`main` reads jobs from stdin and writes results to stdout (protocol.py). Its first frame gives the kind of isolation, or
the reason why there is none.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagu.machine.sandbox import landlock, namespaces, quota
from bagu.machine.sandbox.protocol import Limits, read_frame, write_frame

__all__ = ["isolated", "main"]

CHUNK = 1 << 16


def main(number: int, allowed: list[str]) -> None:
    """`number` is unique among the caller's helpers; `allowed` lists the kinds of isolation to try, in order."""
    jobs, results = io.BufferedReader(io.FileIO(0)), io.BufferedWriter(io.FileIO(1, "wb", closefd=False))
    kind, problems = isolated(allowed)
    write_frame(results, {"isolation": kind, "problems": problems})
    if kind is None:
        return
    gc.freeze()  # the garbage collector then makes no child copy pages
    while True:
        try:
            job = read_frame(jobs)
        except EOFError:
            return
        write_frame(results, _run(job["code"], Limits(**job["limits"]), kind, number))


def isolated(allowed: Sequence[str], also: Sequence[Path] = ()) -> tuple[str | None, list[str]]:
    """The first kind of isolation that this system permits, and the reasons why earlier kinds failed. `also` are
    further folders that programs may read."""
    problems: list[str] = []
    for kind in allowed:
        try:
            if kind == "namespaces":
                _probe_namespaces()
                namespaces.enter_root(also)
            else:
                landlock.check(weak=kind == "landlock-weak")
            return kind, problems
        except OSError as error:
            problems.append(f"{kind}: {error}")
    return None, problems


def _probe_namespaces() -> None:
    """Raise if a child cannot enter namespaces. A child tries it, since a partial change here could not be undone."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            namespaces.enter_root()
            namespaces.enter_job_processes()
        except BaseException as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, CHUNK).decode()
    os.close(reading)
    os.waitpid(child, 0)
    if said:
        raise OSError(said)


def _run(code: str, limits: Limits, kind: str, number: int) -> dict[str, Any]:
    began = time.monotonic()
    out, err, status = (os.pipe() for _ in range(3))
    supervisor = os.fork()
    if supervisor == 0:
        _supervise(code, limits, kind, number, out[1], err[1], status[1])
    for _, writing in (out, err, status):
        os.close(writing)
    stdout, stderr, said = _collect([out[0], err[0], status[0]], limits)
    os.waitpid(supervisor, 0)
    state, exit_code = _judge(said)
    seconds = time.monotonic() - began
    texts = {"stdout": stdout.decode(errors="replace"), "stderr": stderr.decode(errors="replace")}
    return {"status": state, "exit_code": exit_code, "seconds": seconds, **texts}


def _judge(said: bytes) -> tuple[str, int | None]:
    """Parse the supervisor's final message into a status and an exit code."""
    if said == b"timeout":
        return "timeout", None
    code = int(said or b"-9")
    if code < 0:
        return "killed", None
    return ("ok" if code == 0 else "error"), code


def _collect(pipes: list[int], limits: Limits) -> list[bytes]:
    """Read the pipes until all are closed; truncate each to its limit."""
    kept = dict.fromkeys(pipes, b"")
    open_pipes = set(pipes)
    while open_pipes:
        ready, _, _ = select.select(list(open_pipes), [], [])
        for fd in ready:
            data = os.read(fd, CHUNK)
            if data:
                kept[fd] += data[: max(0, limits.output_bytes - len(kept[fd]))]
            else:
                open_pipes.discard(fd)
                os.close(fd)
    return [kept[fd] for fd in pipes]


def _supervise(code: str, limits: Limits, kind: str, number: int, out: int, err: int, status: int) -> None:
    """In the supervisor: start the code, wait for its end or the timeout, and report. Does not return. The folder is
    removed here, so that it is also if the helper was killed."""
    said = b"-9"
    folder = None
    try:
        os.setsid()
        folder = None if kind == "namespaces" else quota.make_folder()
        if kind == "namespaces":
            namespaces.enter_job_processes()
        child = os.fork()
        if child == 0:
            os.close(status)
            _execute(code, limits, folder, number, out, err)
        os.close(out)
        os.close(err)
        said = _wait(child, limits, folder)
        if folder is not None:
            quota.remove_folder(folder)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            os.write(status, said)
        os._exit(0)


def _wait(child: int, limits: Limits, folder: Path | None) -> bytes:
    """The exit code of the child, negative for a signal, or "timeout"; then it and its children are killed."""
    handle = os.pidfd_open(child)
    end = time.monotonic() + limits.seconds
    exceeded = False
    while (left := end - time.monotonic()) > 0 and not exceeded:
        if select.select([handle], [], [], left if folder is None else min(left, quota.INTERVAL))[0]:
            break
        exceeded = folder is not None and quota.is_exceeded(folder, limits, child)
    if left <= 0 or exceeded:
        os.kill(child, signal.SIGKILL)  # in a process namespace all processes end with the first
    _, state = os.waitpid(child, 0)
    if folder is not None and quota.is_exceeded(folder, limits, None):  # also what it wrote after the last measurement
        return b"-9"
    return b"timeout" if left <= 0 else str(os.waitstatus_to_exitcode(state)).encode()


def _execute(code: str, limits: Limits, folder: Path | None, number: int, out: int, err: int) -> None:
    """In the program's own process: drop all rights, then execute the code. Does not return."""
    exit_code = 1
    try:
        os.setsid()  # kill(0) then signals the program, not its supervisor, even from another process namespace
        null = os.open("/dev/null", os.O_RDONLY)
        for fd, place in ((null, 0), (out, 1), (err, 2)):
            os.dup2(fd, place)
        os.closerange(3, 256)
        os.environ.clear()
        if folder is None:
            namespaces.enter_job(limits, number)
        else:
            landlock.enter_job(folder, limits)
            tempfile.tempdir = str(folder)  # /tmp is not its own here
        exit_code = _call(code)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _call(code: str) -> int:
    """Execute `code` as a program and return its exit code."""
    sys.stdin = os.fdopen(0, encoding="utf-8")
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", encoding="utf-8", errors="replace") for fd in (1, 2))
    sys.argv = ["program"]
    sys.path[:] = [p for p in sys.path if p.startswith(sys.base_prefix)]  # the standard library, without bagu
    for name in [n for n in sys.modules if n.partition(".")[0] == "bagu"]:
        del sys.modules[name]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    try:
        exec(compile(code, "<code>", "exec"), module.__dict__)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:
        here = error.__traceback__  # the frame of this function, which is left out of the traceback
        traceback.print_exception(type(error), error, here.tb_next if here else None)
        return 1
    return 0
