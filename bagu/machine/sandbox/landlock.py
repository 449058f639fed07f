"""Isolation where namespaces are not permitted, as in many containers: Landlock for files, seccomp for the rest.

Landlock (Linux 5.13) lets a process read below some folders and write below one. The seccomp filter returns
EPERM for system calls that create processes, threads or sockets, send signals, trace or read another process, or change
the mode, owner or times of a file, which Landlock does not restrict. So the code is one process that can reach neither
the network nor another process.
"""

from __future__ import annotations

import ctypes
import os
import struct

from bagu.machine.sandbox import syscalls
from bagu.machine.sandbox.namespaces import DEVICES, readable_folders
from bagu.machine.sandbox.protocol import Limits

__all__ = ["check", "enter_job"]

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
RULE_PATH_BENEATH, VERSION_FLAG = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
ACCESS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1}  # all rights of an ABI; later ones as 3
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Processes and threads, sockets, signals, other processes' memory, namespaces and mounts, the kernel. And modes,
# owners, times and attributes of files, which Landlock does not restrict.
REFUSED_BY_NAME = {
    "x86_64": {
        "clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "socket": 41, "socketpair": 53, "kill": 62, "tkill": 200,
        "tgkill": 234, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_open": 434,
        "pidfd_send_signal": 424, "pidfd_getfd": 438, "unshare": 272, "setns": 308, "mount": 165, "umount2": 166,
        "bpf": 321, "keyctl": 250, "add_key": 248, "io_uring_setup": 425, "chmod": 90, "fchmod": 91, "fchmodat": 268,
        "fchmodat2": 452, "chown": 92, "fchown": 93, "lchown": 94, "fchownat": 260, "utime": 132, "utimes": 235,
        "futimesat": 261, "utimensat": 280, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197,
        "lremovexattr": 198, "fremovexattr": 199, "prlimit64": 302, "sched_setaffinity": 203, "setpriority": 141,
    },
    "aarch64": {
        "clone": 220, "clone3": 435, "socket": 198, "socketpair": 199, "kill": 129, "tkill": 130, "tgkill": 131,
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_open": 434, "pidfd_send_signal": 424,
        "pidfd_getfd": 438, "unshare": 97, "setns": 268, "mount": 40, "umount2": 39, "bpf": 280, "keyctl": 219,
        "add_key": 217, "io_uring_setup": 425, "fchmod": 52, "fchmodat": 53, "fchmodat2": 452, "fchownat": 54,
        "fchown": 55, "utimensat": 88, "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14,
        "lremovexattr": 15, "fremovexattr": 16, "prlimit64": 261, "sched_setaffinity": 122, "setpriority": 140,
    },
}  # fmt: skip
X32_BIT = 0x40000000  # x86-64's second table of system calls
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06  # of classic BPF
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE: EPERM


def check() -> None:
    """Raise OSError if the kernel has no Landlock or the system calls of this architecture are not listed."""
    _abi()
    if syscalls.machine() not in ARCHITECTURES:
        raise OSError(f"no seccomp filter is written for {syscalls.machine()}")


def enter_job(folder: str, limits: Limits) -> None:
    """Restrict this process permanently: it may write only below `folder`. Root stays root but loses its capabilities:
    another user might not be able to read the interpreter's files."""
    os.chdir(folder)
    syscalls.no_new_privileges()
    if os.geteuid() == 0:
        syscalls.drop_capability_bound()
        syscalls.drop_capabilities()
    syscalls.set_limits(limits)
    _restrict_files(folder)
    _restrict_calls()


def _abi() -> int:
    return syscalls.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), VERSION_FLAG, name="landlock_create_ruleset")


def _restrict_files(folder: str) -> None:
    handled = ACCESS_BY_ABI[min(_abi(), 3)]
    attributes = ctypes.c_uint64(handled)
    ruleset = syscalls.syscall(
        CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(8), 0, name="landlock_create_ruleset"
    )
    read = EXECUTE | READ_FILE | READ_DIR
    allowed = [*((str(p), read) for p in readable_folders()), *((p, READ_FILE | WRITE_FILE) for p in DEVICES)]
    for path, access in [*allowed, (folder, handled & ~EXECUTE)]:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", access & handled, fd)
        syscalls.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0, name="landlock_add_rule")
        os.close(fd)
    syscalls.syscall(RESTRICT_SELF, ruleset, 0, name="landlock_restrict_self")
    os.close(ruleset)


def _restrict_calls() -> None:
    machine = syscalls.machine()
    refused = list(REFUSED_BY_NAME[machine].values())
    program = [
        (LOAD, 0, 0, 4),  # the architecture of the call
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # its number
        *([(JUMP_AT_LEAST, len(refused) + 1, 0, X32_BIT)] if machine == "x86_64" else []),
        *((JUMP_EQUAL, len(refused) - i, 0, number) for i, number in enumerate(refused)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    syscalls.prctl_pointer(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header)
