"""The system calls that code may make, as a seccomp filter: a list of what is allowed; everything else returns EPERM.

The list is what the standard library needs for computing, files, time and its own signals. With namespaces a program
may also have processes, threads and Unix sockets; without them it is one process, and cannot change the modes, owners
or times of files, which Landlock does not restrict. Where an argument decides, it is compared: the command of `fcntl`
(F_SETOWN would have the kernel signal another process), the target of `kill`, the family of a socket.

Not listed, so refused in both: System V and POSIX IPC, which outlive a program; memfd_create, whose memory no limit of
a process counts; tracing and other processes' memory, keys, io_uring, bpf, perf, userfaultfd, mounts and namespaces,
and whatever a later kernel adds. The numbers of x86-64 and riscv64 are from the kernel's tables and were not run.
"""

import ctypes
import errno
import os
import struct
from dataclasses import dataclass
from typing import Literal

from bagu.machine.sandbox import syscalls

# name: (number on x86-64, number in the generic table of aarch64 and riscv64); None where the table does not have it.
Table = dict[str, tuple[int | None, int | None]]
ALWAYS: Table = {
    # files and folders
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "lseek": (8, 62), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65),
    "writev": (20, 66), "access": (21, None), "pipe": (22, None), "dup": (32, 23), "dup2": (33, None),
    "sendfile": (40, 71), "fcntl": (72, 25), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83),
    "truncate": (76, 45), "ftruncate": (77, 46), "getdents": (78, None), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None), "creat": (85, None),
    "link": (86, None), "unlink": (87, None), "symlink": (88, None), "readlink": (89, None), "umask": (95, 166),
    "statfs": (137, 43), "fstatfs": (138, 44), "getdents64": (217, 61), "fadvise64": (221, 223), "openat": (257, 56),
    "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38), "linkat": (265, 37),
    "symlinkat": (266, 36), "readlinkat": (267, 78), "faccessat": (269, 48), "dup3": (292, 24), "pipe2": (293, 59),
    "preadv": (295, 69), "pwritev": (296, 70), "renameat2": (316, 276), "copy_file_range": (326, 285),
    "preadv2": (327, 286), "pwritev2": (328, 287), "statx": (332, 291), "close_range": (436, 436),
    "faccessat2": (439, 439), "ioctl": (16, 29),
    # waiting
    "poll": (7, None), "select": (23, None), "epoll_create": (213, None), "epoll_wait": (232, None),
    "epoll_ctl": (233, 21), "pselect6": (270, 72), "ppoll": (271, 73), "epoll_pwait": (281, 22),
    "eventfd2": (290, 19), "epoll_create1": (291, 20), "epoll_pwait2": (441, 441), "futex": (202, 98),
    "wait4": (61, 260), "waitid": (247, 95), "pause": (34, None), "sched_yield": (24, 124),
    # time
    "nanosleep": (35, 101), "getitimer": (36, 102), "alarm": (37, None), "setitimer": (38, 103),
    "gettimeofday": (96, 169), "times": (100, 153), "time": (201, None), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "timerfd_create": (283, 85),
    "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87),
    # memory
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "msync": (26, 227), "mincore": (27, 232), "madvise": (28, 233),
    # the process itself
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133), "sigaltstack": (131, 132),
    "restart_syscall": (219, 128), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "exit": (60, 93),
    "exit_group": (231, 94), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getgroups": (115, 158),
    "getresuid": (118, 148), "getresgid": (120, 150), "getpgrp": (111, None), "getpgid": (121, 155),
    "getsid": (124, 156), "getpriority": (140, 141), "getrlimit": (97, 163), "setrlimit": (160, 164),
    "prlimit64": (302, 261), "getrusage": (98, 165), "sched_getaffinity": (204, 123), "getcpu": (309, 168),
    "uname": (63, 160), "sysinfo": (99, 179), "getrandom": (318, 278), "prctl": (157, 167),
    "arch_prctl": (158, None), "set_tid_address": (218, 96), "set_robust_list": (273, 99), "rseq": (334, 293),
}  # fmt: skip
WITH_NAMESPACES: Table = {
    # processes and threads
    "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "setpgid": (109, 154), "setsid": (112, 157), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    # Unix sockets: the network namespace holds nothing else
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "sendto": (44, 206), "recvfrom": (45, 207),
    "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210), "bind": (49, 200), "listen": (50, 201),
    "getsockname": (51, 204), "getpeername": (52, 205), "socketpair": (53, 199), "setsockopt": (54, 208),
    "getsockopt": (55, 209), "accept4": (288, 242),
    # modes, owners, times and attributes of files, in a file system of its own
    "chmod": (90, None), "fchmod": (91, 52), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None),
    "utime": (132, None), "mknod": (133, None), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "getxattr": (191, 8), "lgetxattr": (192, 9), "fgetxattr": (193, 10), "listxattr": (194, 11),
    "llistxattr": (195, 12), "flistxattr": (196, 13), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "utimes": (235, None), "mknodat": (259, 33), "fchownat": (260, 54),
    "futimesat": (261, None), "fchmodat": (268, 53), "utimensat": (280, 88), "fallocate": (285, 47),
    "fchmodat2": (452, 452),
}  # fmt: skip
CLONE3 = 435  # in both tables; its flags are in memory, which a filter cannot read. After ENOSYS, libc uses clone


@dataclass(frozen=True)
class Argument:
    """A call is allowed if the low 32 bits of this argument, under the mask, have one of the values. The kernel reads
    no more than 32 bits of the arguments named below."""

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF


FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)  # duplicate, flags, record locks, the size of a pipe
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, its size, bytes to read, flags
PRCTL = (3, 15, 16, 0x53564D41)  # is it dumpable, its name, names of mappings (malloc)
NEW_NAMESPACES = 0x7E020000  # the flags CLONE_NEW* of clone
AF_UNIX = 1

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "riscv64": (1, 0xC00000F3)}
X32_BIT = 0x40000000  # x86-64's second table of system calls
LOAD, AND, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # of classic BPF
ALLOW, RETURN_ERRNO, KILL = 0x7FFF0000, 0x00050000, 0x80000000
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
Line = tuple[int, int, int, int]


def check() -> None:
    """Raise OSError if the system calls of this machine are not listed."""
    if syscalls.machine() not in ARCHITECTURES:
        raise OSError(f"no seccomp filter is written for {syscalls.machine()}")


def restrict_calls(kind: Literal["namespaces", "landlock"]) -> None:
    """Filter the calls of this process and its children permanently. It must have set `no_new_privileges`."""
    program = _program(kind, syscalls.machine(), os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    syscalls.prctl_pointer(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header)


def _program(kind: Literal["namespaces", "landlock"], machine: str, pid: int) -> list[Line]:
    column, architecture = ARCHITECTURES[machine]
    tables = ALWAYS | (WITH_NAMESPACES if kind == "namespaces" else {})
    checked = _arguments(kind, pid)
    refuse = (RETURN, 0, 0, RETURN_ERRNO | errno.EPERM)
    program: list[Line] = [
        (LOAD, 0, 0, 4),  # the architecture of the call
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),  # its number
        *([(JUMP_AT_LEAST, 0, 1, X32_BIT), refuse] if machine == "x86_64" else []),
        (JUMP_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, RETURN_ERRNO | errno.ENOSYS),
    ]
    for name, numbers in tables.items():
        number = numbers[column]
        if number is not None:
            body = _compare(checked[name], refuse) if name in checked else [(RETURN, 0, 0, ALLOW)]
            program += [(JUMP_EQUAL, 0, len(body), number), *body]
    return [*program, refuse]


def _arguments(kind: str, pid: int) -> dict[str, Argument]:
    found = {
        "fcntl": Argument(1, FCNTL),
        "ioctl": Argument(1, IOCTL),
        "prctl": Argument(0, PRCTL),
        "prlimit64": Argument(0, (0,)),  # its own limits, which cannot be raised
    }
    if kind == "namespaces":  # kill reaches the program's own processes alone
        family = Argument(0, (AF_UNIX,))
        return {**found, "clone": Argument(0, (0,), NEW_NAMESPACES), "socket": family, "socketpair": family}
    return {**found, **dict.fromkeys(("kill", "tkill", "tgkill"), Argument(0, (pid,)))}


def _compare(argument: Argument, refuse: Line) -> list[Line]:
    """Lines that allow the call for the listed values, and refuse it otherwise."""
    values = argument.values
    return [
        (LOAD, 0, 0, 16 + 8 * argument.index),  # both machines store the low word first
        (AND, 0, 0, argument.mask),
        *((JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)),
        refuse,
        (RETURN, 0, 0, ALLOW),
    ]
