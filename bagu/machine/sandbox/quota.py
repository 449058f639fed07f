"""The folder of a program where no file system of limited size can be mounted: its use is measured while it runs.

The kernel limits each file (RLIMIT_FSIZE), not all of them together. So the supervisor measures every 10 ms and kills a
program above its quota; what the program writes within such an interval (about 20 MB at 2 GB/s) can be above it for
that time, and is deleted with the rest.
"""

import itertools
import os
import re
import stat
import tempfile
from pathlib import Path

from bagu.machine.sandbox.protocol import Limits

INTERVAL = 0.01  # seconds; a measurement takes about 0.1 ms


def make_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="bagu-sandbox-")) / "job"
    folder.mkdir()
    return folder


def is_exceeded(folder: Path, limits: Limits, pid: int | None) -> bool:
    """Whether the folder, and the deleted files that process `pid` still has open, are above the limits. A folder that
    cannot be read (its mode, or a path that is too long) counts as above."""
    try:
        found = [*_entries(folder), *(_deleted_files(folder, pid) if pid else [])]
    except OSError:
        return True
    return len(found) > limits.files or sum(max(s.st_size, 512 * s.st_blocks) for s in found) > limits.disk_bytes


def _entries(folder: Path) -> list[os.stat_result]:
    found, waiting = [], [str(folder)]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except FileNotFoundError:  # deleted since its parent was read
            continue
        for entry in entries:
            try:
                state = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            found.append(state)
            if stat.S_ISDIR(state.st_mode):
                waiting.append(entry.path)
    return found


def _deleted_files(folder: Path, pid: int) -> list[os.stat_result]:
    """The deleted files that the process has open. Raises OSError if it has one mapped: a mapping does not tell the
    size of its file."""
    maps = Path(f"/proc/{pid}/maps").read_bytes()
    if re.search(re.escape(os.fsencode(folder)) + rb"/.* \(deleted\)$", maps, re.MULTILINE):
        raise OSError("a deleted file is mapped")
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            state = descriptor.stat()
        except FileNotFoundError:  # closed since
            continue
        if stat.S_ISREG(state.st_mode) and state.st_nlink == 0:
            found.append(state)
    return found


def remove_folder(folder: Path) -> None:
    """Delete the folder, however deep and whatever its modes. Subfolders are moved up before they are emptied: paths
    stay short, and there is no recursion."""
    numbers = itertools.count()
    waiting = [folder]
    while waiting:
        place = waiting.pop()
        for path in list(place.iterdir()):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
                waiting.append(path.rename(folder.parent / str(next(numbers))))
            else:
                path.unlink()
        place.rmdir()
    folder.parent.rmdir()
