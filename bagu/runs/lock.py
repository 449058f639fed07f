"""A lock that allows one writer per folder: a file that names the process. The lock of a dead process is taken over.

Whether a process of another machine lives is seen by the file's time, which its owner renews: a job that was requeued
on another machine watches it for a while and takes the lock over. No clocks are compared.
"""

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bagu.errors import BaguError

RENEWED_S = 5.0  # the time between two renewals
WATCHED_S = 20.0  # without a renewal, after which an owner on another machine counts as dead


class Lock:
    """Held by one process at a time, until it is released or the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False
        self._released = threading.Event()

    def take(self) -> None:
        elsewhere = self._silent_owner()
        with self._exclusive() as file:
            owner = _owner(file.read())
            if owner and owner != elsewhere and _is_running(owner):
                raise BaguError(
                    f"process {owner['pid']} on {owner['host']} is writing to {self.path.parent}",
                    hint=f"wait for it or stop it; if it does not exist any more, delete {self.path}",
                )
            file.seek(0)
            file.truncate()
            me = os.getpid()
            file.write(json.dumps({"pid": me, "host": platform.node(), "born": _start_time(me), "renewed": RENEWED_S}))
        self.held = True
        self._released.clear()
        threading.Thread(target=self._renew, name="bagu-lock", daemon=True).start()

    def release(self) -> None:
        if self.held:
            self.held = False
            self._released.set()
            with self._exclusive() as file:
                file.truncate(0)

    def _renew(self) -> None:
        while not self._released.wait(RENEWED_S):
            with contextlib.suppress(OSError):  # a full or absent file system ends the run elsewhere
                os.utime(self.path)

    def _silent_owner(self) -> dict[str, Any] | None:
        """The owner on another machine that did not renew its lock while it was watched."""
        if not self.path.is_file():
            return None
        owner, time_of_file = self._watched()
        if owner is None or owner["host"] == platform.node() or "renewed" not in owner:
            return None
        deadline = time.monotonic() + WATCHED_S
        while time.monotonic() < deadline:
            time.sleep(min(1.0, WATCHED_S / 20))
            if self._watched() != (owner, time_of_file):
                return None
        return owner

    def _watched(self) -> tuple[dict[str, Any] | None, int]:
        with self.path.open(encoding="utf-8") as file:  # NFS asks the server for the time of a file that is opened
            return _owner(file.read()), os.fstat(file.fileno()).st_mtime_ns

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[Any]:
        """The open file, under an exclusive flock. The file is never deleted: two processes could then both lock."""
        with self.path.open("a+", encoding="utf-8") as file:
            try:
                import fcntl
            except ImportError:  # Windows: two processes that start in the same millisecond may both get the lock
                pass
            else:
                # held for microseconds, not for the run: a forked worker would keep it after its parent has died
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            yield file


def _owner(text: str) -> dict[str, Any] | None:
    """The owner named in the lock file; None if it is free. A partial file means that the lock was never held."""
    try:
        owner = json.loads(text)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) and {"pid", "host", "born"} <= owner.keys() else None


def _is_running(owner: Mapping[str, Any]) -> bool:
    """Whether the owner still runs. A process that cannot be checked (another machine, Windows) counts as running."""
    if owner["host"] != platform.node() or os.name != "posix":
        return True
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return owner["born"] is None or owner["born"] == _start_time(owner["pid"])  # else the pid was reused


def _start_time(pid: int) -> str | None:
    """The start time of a process in ticks since boot; "zombie" if it is dead but not reaped; None if unknown."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return "zombie" if state in "ZX" else rest[18]
