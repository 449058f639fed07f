"""Isolation where namespaces are not permitted, as in many containers: Landlock for files, seccomp for the rest.

Landlock lets a process read below some folders and write below one. The seccomp filter (calls.py) leaves it one process
that can reach neither the network nor another process. The supervisor measures its folder (quota.py).

Landlock restricts contents, not metadata: code can still learn that a file outside exists, its size and times. Before
Linux 6.2 (ABI 3) it does not restrict truncation either, so that code could empty the user's files: such a kernel is
refused, unless the kind `landlock-weak` is asked for by name.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

from bagu.machine.sandbox import calls, syscalls
from bagu.machine.sandbox.namespaces import DEVICES, readable_folders
from bagu.machine.sandbox.protocol import Limits

__all__ = ["check", "enter_job"]

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
RULE_PATH_BENEATH, VERSION_FLAG = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ACCESS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}  # all rights of an ABI; later ones as 3
TRUNCATE_ABI = 3


def check(*, weak: bool = False) -> None:
    """Raise OSError if the kernel has no Landlock, or one that does not restrict truncation and is not `weak`."""
    calls.check()
    if _abi() < TRUNCATE_ABI and not weak:
        raise OSError(
            f"Landlock ABI {_abi()} lets code truncate files (Linux 6.2 does not); `landlock-weak` accepts it"
        )
    list(Path("/proc/self/fd").iterdir())  # the quota needs /proc


def enter_job(folder: Path, limits: Limits, also: Sequence[Path] = ()) -> None:
    """Restrict this process permanently: it may write only below `folder`, and read below `also`. Root stays
    root but loses its capabilities: another user might not be able to read the interpreter's files."""
    os.chdir(folder)
    syscalls.no_new_privileges()
    if os.geteuid() == 0:
        syscalls.drop_capability_bound()
        syscalls.drop_capabilities()
    syscalls.set_limits(limits)
    syscalls.die_with_parent()
    _restrict_files(folder, also)
    calls.restrict_calls("landlock")


def _abi() -> int:
    return syscalls.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_FLAG, name="landlock_create_ruleset")


def _restrict_files(folder: Path, also: Sequence[Path]) -> None:
    handled = ACCESS_BY_ABI[min(_abi(), 3)]
    attributes = ctypes.c_uint64(handled)
    ruleset = syscalls.syscall(
        CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(8), 0, name="landlock_create_ruleset"
    )
    read = EXECUTE | READ_FILE | READ_DIR
    allowed = [*((str(p), read) for p in readable_folders(also)), *((p, READ_FILE | WRITE_FILE) for p in DEVICES)]
    for path, access in [*allowed, (str(folder), handled & ~EXECUTE)]:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access & handled, fd)
        syscalls.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0, name="landlock_add_rule")
        os.close(fd)
    syscalls.syscall(RESTRICT_SELF, ruleset, 0, name="landlock_restrict_self")
    os.close(ruleset)
