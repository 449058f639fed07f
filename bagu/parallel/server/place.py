"""The settings of a process of the server group: one environment variable, as JSON."""

import json
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "BAGU_SERVED"


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
    if (text := environ.get(VARIABLE)) is None:
        return None
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
