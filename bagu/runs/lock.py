"""One writer of a folder: a file that names the process. The lock of a process that is gone is taken over."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bagu.errors import BaguError

__all__ = ["Lock"]


class Lock:
    """Taken by one process at a time, and held until it is released or the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.held = False

    def take(self) -> None:
        with self._only_me() as file:
            owner = _owner(file.read())
            if owner and _lives(owner):
                raise BaguError(
                    f"{self.path.parent} is being written by process {owner['pid']} on {owner['host']}",
                    hint=f"wait for it or stop it; if it is gone, delete {self.path}",
                )
            file.seek(0)
            file.truncate()
            me = os.getpid()
            file.write(json.dumps({"pid": me, "host": platform.node(), "born": _born(me)}))
        self.held = True

    def release(self) -> None:
        if self.held:
            self.held = False
            with self._only_me() as file:
                file.truncate(0)

    @contextlib.contextmanager
    def _only_me(self) -> Iterator[Any]:
        """The open file, while no other process looks at it. It is never deleted: that would split the lock in two."""
        with self.path.open("a+", encoding="utf-8") as file:
            try:
                import fcntl
            except ImportError:  # Windows: two processes that start in the same millisecond are not kept apart
                pass
            else:
                # held for microseconds and not for the run: a forked worker would go on holding it for a dead parent
                fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            yield file


def _owner(text: str) -> dict[str, Any] | None:
    """Who wrote the lock; None when it is free. A lock torn by a kill was never held."""
    try:
        owner = json.loads(text)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) and {"pid", "host", "born"} <= owner.keys() else None


def _lives(owner: Mapping[str, Any]) -> bool:
    """Whether the lock's process still runs; one that cannot be asked (another machine, Windows) counts as alive."""
    if owner["host"] != platform.node() or os.name != "posix":
        return True
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return owner["born"] is None or owner["born"] == _born(owner["pid"])  # else the number was given out again


def _born(pid: int) -> str | None:
    """When a process began, in ticks since the boot; None where that cannot be known. A zombie was never born."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return "zombie" if state in "ZX" else rest[18]
