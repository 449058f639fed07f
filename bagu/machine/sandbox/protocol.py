"""What crosses between the caller and a helper process: frames of JSON with a length in front."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

__all__ = ["Limits", "Result", "read_frame", "write_frame"]

HEADER = struct.Struct("!I")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one piece of code. Memory is the address space of each process, of which Python itself takes about 30 MB."""

    seconds: float = 5.0  # wall time, and CPU time rounded up
    memory_bytes: int = 512 << 20
    processes: int = 8  # at once, threads included; one without namespaces
    disk_bytes: int = 16 << 20  # of the temporary folder
    output_bytes: int = 64 << 10  # kept of stdout and of stderr; the rest is dropped


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a piece of code ended.

    ok: it ran to its end or exited with 0. error: an exception or another exit code. timeout: its time was up.
    killed: a signal ended it; the kernel sends SIGXCPU past the CPU limit and SIGXFSZ past the file size.
    """

    status: Literal["ok", "error", "timeout", "killed"]
    exit_code: int | None  # None after a timeout or a signal
    stdout: str
    stderr: str
    seconds: float


def write_frame(file: BinaryIO, value: Any) -> None:
    data = json.dumps(value).encode()
    file.write(HEADER.pack(len(data)) + data)
    file.flush()


def read_frame(file: BinaryIO) -> Any:
    """The next value; raises EOFError when the other side has closed."""
    head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise EOFError("the pipe was closed")
    (size,) = HEADER.unpack(head)
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the pipe was closed within a frame")
    return json.loads(data)
