"""The settings of a process of the server group: one environment variable, as JSON; for readers a file of the run."""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bagu.errors import BaguError

VARIABLE = "BAGU_SERVED"
FILE = "place.json"  # in the folder of a run, while its servers run


@dataclass(frozen=True, kw_only=True)
class Place:
    """`role` is manager, server or worker, `number` which one. `host` is where this process listens."""

    role: str
    number: int
    servers: int
    manager: tuple[str, int]
    token: str
    host: str = "127.0.0.1"

    def environ(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def read_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """The place of this process; None if it has none."""
    return None if (text := environ.get(VARIABLE)) is None else _of(text)


def write_place(place: Place, folder: Path) -> None:
    """Let readers find the servers of a run. The file has the secret of the run: only its owner can read it."""
    with open(folder / FILE, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(json.dumps(asdict(place)))


def found_place(folder: str | Path) -> Place:
    """Where the servers of the run in `folder` are."""
    try:
        return _of((Path(folder) / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BaguError(
            f"{folder} is not a run whose parameter servers are running", hint="bagu train … --servers 4 --out RUN"
        ) from None


def _of(text: str) -> Place:
    found = json.loads(text)
    return Place(**{**found, "manager": tuple(found["manager"])})


def new_group(servers: int, host: str = "127.0.0.1") -> Place:
    """The place of a manager: a free port, and a secret that all processes of the run share."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    return Place(
        role="manager", number=0, servers=servers, manager=(host, port), token=secrets.token_hex(16), host=host
    )
