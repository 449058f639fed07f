"""What the other parts know of an adapter. Imports no torch: the HTTP server's process uses it too."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AdapterInfo:
    name: str  # requests choose it by this name
    path: str
    rank: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Resident:
    """An adapter in its slot."""

    info: AdapterInfo
    slot: int
    root: bytes  # of its prefix cache keys
