"""Messages between the caller and a helper process: JSON frames with a length prefix."""

import json
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

HEADER = struct.Struct("!I")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one program. Memory is the address space of each process; Python itself takes about 30 MB."""

    seconds: float = 5.0  # wall time; CPU time is limited to this, rounded up
    memory_bytes: int = 512 << 20
    processes: int = 8  # at once, including threads; 1 without namespaces
    disk_bytes: int = 16 << 20  # size of the temporary folder, of all its files together
    files: int = 1024  # and folders, in it
    output_bytes: int = 64 << 10  # kept of stdout and of stderr each; the rest is dropped


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one program.

    ok: it ran to its end or exited with 0. error: an exception or another exit code. timeout: it reached its time
    limit. killed: a signal ended it; the kernel sends SIGXCPU above the CPU limit and SIGXFSZ above the file size, the
    supervisor SIGKILL above the size of the folder.
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
    """Read the next value; raise EOFError if the other side has closed."""
    head = file.read(HEADER.size)
    if len(head) < HEADER.size:
        raise EOFError("the pipe was closed")
    (size,) = HEADER.unpack(head)
    data = file.read(size)
    if len(data) < size:
        raise EOFError("the pipe was closed within a frame")
    return json.loads(data)
