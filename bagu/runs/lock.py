"""A lock that allows one writer per folder: a file that names the process. The lock of a dead process is taken over."""

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bagu.errors import BaguError


class Lock:
    """Held by one process at a time, until it is released or the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False

    def take(self) -> None:
        with self._exclusive() as file:
            owner = _owner(file.read())
            if owner and _is_running(owner):
                raise BaguError(
                    f"process {owner['pid']} on {owner['host']} is writing to {self.path.parent}",
                    hint=f"wait for it or stop it; if it does not exist any more, delete {self.path}",
                )
            file.seek(0)
            file.truncate()
            me = os.getpid()
            file.write(json.dumps({"pid": me, "host": platform.node(), "born": _start_time(me)}))
        self.held = True

    def release(self) -> None:
        if self.held:
            self.held = False
            with self._exclusive() as file:
                file.truncate(0)

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
