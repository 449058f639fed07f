"""System calls that Python 3.11 has no function for, through libc. Each raises OSError with the call's name."""

import ctypes
import os
import platform
import resource
import signal

from bagu.machine.sandbox.protocol import Limits

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 1, 38, 24
CAPABILITY_VERSION_3 = 0x20080522
NUMBERS = {  # by machine; x86-64's table, and the generic one that aarch64 and riscv64 use
    "x86_64": {"pivot_root": 155, "capset": 126},
    "aarch64": {"pivot_root": 41, "capset": 91},
    "riscv64": {"pivot_root": 41, "capset": 91},
}

libc = ctypes.CDLL(None, use_errno=True)


def machine() -> str:
    return platform.machine()


def _check(result: int, name: str) -> int:
    if result == -1:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def syscall(number: int, *args: object, name: str) -> int:
    return _check(libc.syscall(ctypes.c_long(number), *args), name)


def unshare(flags: int) -> None:
    _check(libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _check(libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]), f"mount {target}")


def unmount(target: str, flags: int) -> None:
    _check(libc.umount2(target.encode(), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    syscall(NUMBERS[machine()]["pivot_root"], new.encode(), old.encode(), name="pivot_root")


def prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    _check(libc.prctl(option, ctypes.c_ulong(argument), zero, zero, zero), f"prctl {option}")


def prctl_pointer(option: int, argument: int, pointer: object) -> None:
    _check(libc.prctl(option, ctypes.c_ulong(argument), pointer), f"prctl {option}")


def no_new_privileges() -> None:
    """Prevent set-uid programs from giving this process more rights."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends. A change of the user id would undo it."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def drop_capability_bound() -> None:
    """Prevent every program started later from having capabilities, whoever owns its file."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) == -1:
            return  # after the kernel's last capability


def drop_capabilities() -> None:
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    empty = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, in two words each
    syscall(NUMBERS[machine()]["capset"], header, empty, name="capset")


def set_limits(limits: Limits) -> None:
    """Limit this process and all its children."""
    for kind, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, int(limits.seconds) + 1),
        (resource.RLIMIT_FSIZE, limits.disk_bytes),
        (resource.RLIMIT_NPROC, limits.processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))
