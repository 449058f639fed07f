"""Isolation by Linux namespaces.

Once, for the helper process (`enter_root`): its own network (none) and mounts. The root folder becomes a memory
file system with read-only mounts of the interpreter and the system's libraries, and no user files.

For each program (`enter_job`): its own process ids, so that it cannot name or signal another process, and all of its
processes end with the first; its own IPC, which ends with it; its own /tmp of limited size and its own /proc; a user
id that owns nothing; no capabilities; the system calls of calls.py.

Root creates namespaces directly. Another user first creates a user namespace, in which it may do the same.
"""

from __future__ import annotations

import errno
import os
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bagu.machine.sandbox import calls, syscalls
from bagu.machine.sandbox.protocol import Limits

__all__ = ["DEVICES", "USER", "become_user", "enter_job", "enter_job_processes", "enter_root", "readable_folders"]

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MOUNT_FLAGS = {"nodev": MS_NODEV, "noexec": MS_NOEXEC, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
MNT_DETACH = 2
USER = 1_900_000_000  # the first user id for code that root starts; no system assigns ids in this range
LIBRARIES = ("/usr", "/lib", "/lib64", "/bin")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


def enter_root(also: Sequence[Path] = ()) -> None:
    """Detach this process from the user's files and network; it can still read the folders in `also`. Raises OSError if
    the system does not permit it."""
    calls.check()
    new_user = os.geteuid() != 0
    uid, gid = os.geteuid(), os.getegid()
    others = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWUTS
    if new_user:
        syscalls.unshare(syscalls.CLONE_NEWUSER | others)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    else:
        syscalls.unshare(others)
    syscalls.mount("none", "/", None, MS_REC | MS_PRIVATE)  # later mounts are not visible outside
    _build_root(Path(tempfile.gettempdir()), also)


def _build_root(root: Path, also: Sequence[Path]) -> None:
    """Make `root` a small file system with the interpreter, the libraries and a few devices, and pivot into it."""
    paths = {path: root / path.relative_to("/") for path in (*readable_folders(also), *map(Path, DEVICES))}
    syscalls.mount("tmpfs", str(root), "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path, target in paths.items():
        if path.is_symlink():  # /lib -> usr/lib
            target.symlink_to(path.readlink())
        elif path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
            syscalls.mount(str(path), str(target), None, MS_BIND | MS_REC)
            _make_read_only(target)
        else:
            target.parent.mkdir(exist_ok=True)
            target.touch()
            syscalls.mount(str(path), str(target), None, MS_BIND)
    for name in ("proc", "tmp", "old"):
        (root / name).mkdir(exist_ok=True)
    syscalls.mount("/proc", str(root / "proc"), None, MS_BIND | MS_REC)  # a job mounts its own over it
    syscalls.pivot_root(str(root), str(root / "old"))
    os.chdir("/")
    syscalls.unmount("/old", MNT_DETACH)
    Path("/old").rmdir()
    syscalls.mount("none", "/", None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _make_read_only(target: Path) -> None:
    """Remount what is mounted at and below `target`; the kernel does not remount recursively. A user namespace may add
    flags to a mount, not remove them."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields = line.split()
        point = fields[4].encode().decode("unicode_escape")  # a space is written \040
        if Path(point).is_relative_to(target):
            kept = sum(MOUNT_FLAGS.get(option, 0) for option in fields[5].split(","))
            try:
                syscalls.mount("none", point, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)
            except OSError as error:  # EINVAL below the target: a later mount covers this one, which nobody can reach
                if error.errno != errno.EINVAL or Path(point) == target:
                    raise


def readable_folders(also: Sequence[Path] = ()) -> list[Path]:
    """The folders that code may read: the system's libraries, the standard library if it is outside of them, `also`."""
    found = [Path(p) for p in LIBRARIES if Path(p).exists()]
    standard = (sys.base_prefix, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    for path in (*map(Path, standard), *also):
        if not any(path.is_relative_to(f) for f in found):
            found.append(path)
    return found


def enter_job_processes() -> None:
    """Make the next child the first process of a new process namespace, with an IPC namespace that ends with it."""
    syscalls.unshare(syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNS | syscalls.CLONE_NEWIPC)


def enter_job(limits: Limits, number: int) -> None:
    """In that child: set up its own /tmp and /proc and drop all rights. `number` is unique among running jobs."""
    size = f"size={limits.disk_bytes},mode=1777,nr_inodes={limits.files}"
    syscalls.mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, size)
    syscalls.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    os.chdir("/tmp")
    syscalls.no_new_privileges()
    syscalls.drop_capability_bound()
    if _is_root_outside():
        become_user(number)
    syscalls.drop_capabilities()
    syscalls.set_limits(limits)
    syscalls.die_with_parent()
    calls.restrict_calls("namespaces")


def become_user(number: int) -> None:
    """Switch to a user id of this job only: the kernel counts processes per user, and does not limit root."""
    user = USER + number
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _is_root_outside() -> bool:
    """Whether user 0 here is user 0 of the system, to which limits do not apply."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ["0", "0", "4294967295"]
