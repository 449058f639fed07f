"""The store of tunings: an append-only file of JSON lines, one line per measurement and one per result of a search.

An appended line is written by one `write` call to a file opened for appending, so several processes may write at once,
and a crash loses at most the line being written. Two stores merge by concatenation. A line that is cut off, or of
another version, is skipped and counted; the other lines are used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bagu.errors import ArgumentError
from bagu.machine.cache import cache_folder

__all__ = [
    "Kind", "Measurement", "Options", "Shapes", "Store", "Winner", "add_missing", "merge", "missing", "missing_file",
    "shipped_store", "user_store", "winners",
]  # fmt: skip

VERSION = 1

Options = Mapping[str, int | None]
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The calls that a tuning is for: one step of an op at these shapes, on this device, with this source code."""

    op: str
    step: str  # "forward" or "backward"
    dtype: str
    shapes: Shapes  # of the tensor arguments, in the order of the call
    device: str  # its name
    source: str  # hash of the kernels' source (source.py)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One set of options at one kind of call. `status` is ok, compile, spills, wrong or failed."""

    kind: Kind
    options: Options
    status: str
    median_s: float | None
    low_s: float | None
    high_s: float | None
    samples: int
    seconds: float  # spent on it, compilation included
    environment: Mapping[str, Any] = field(default_factory=dict)  # memory, driver, Triton, torch
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The result of a search: the options to use. Empty options are the kernel's defaults: nothing was faster."""

    kind: Kind
    options: Options
    speedup: float  # over the default, 1.0 if nothing was significantly faster
    searched: int  # sets of options measured
    space: int  # sets of options in the space
    seconds: float


Record = Measurement | Winner
KINDS: dict[str, type[Record]] = {"measurement": Measurement, "winner": Winner}


@dataclass(frozen=True)
class Store:
    """A file of records."""

    path: Path

    def append(self, record: Record) -> None:
        """Write one record at once. Raises if the file cannot be written."""
        name = next(n for n, kind in KINDS.items() if isinstance(record, kind))
        line = json.dumps({"version": VERSION, "record": name, **asdict(record)}, separators=(",", ":")) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ArgumentError(
                f"the tuning store {self.path} cannot be written: {error.strerror}",
                hint="set BAGU_TUNING to a file in a folder that can be written",
            ) from None
        try:
            # a line that an earlier process left unfinished must not swallow this one
            end = os.lseek(descriptor, 0, os.SEEK_END)
            complete = end == 0 or os.pread(descriptor, 1, end - 1) == b"\n"
            os.write(descriptor, (line if complete else "\n" + line).encode())
        finally:
            os.close(descriptor)

    def records(self) -> Iterator[Record]:
        return (record for record in self._lines() if record is not None)

    def unreadable(self) -> int:
        """Number of lines that are cut off, damaged, or of another version."""
        return sum(record is None for record in self._lines())

    def _lines(self) -> Iterator[Record | None]:
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            for line in file:
                if line.strip():
                    yield parse(line)


def parse(line: bytes) -> Record | None:
    """The record of a line, or None if it has none of this version."""
    try:
        fields = json.loads(line)
        if fields.pop("version") != VERSION:
            return None
        kind = fields.pop("kind")
        kind["shapes"] = tuple(tuple(int(n) for n in shape) for shape in kind["shapes"])
        return KINDS[fields.pop("record")](kind=Kind(**kind), **fields)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def user_store() -> Store:
    """The file that `bagu tune ops` writes: $BAGU_TUNING, or tuning.jsonl in the cache folder."""
    given = os.environ.get("BAGU_TUNING")
    return Store(Path(given) if given else cache_folder() / "tuning.jsonl")


def shipped_store() -> Store:
    """The measurements that come with the package."""
    return Store(Path(__file__).parent / "shipped.jsonl")


def missing_file() -> Path:
    """The list of calls that found no tuning, beside the user's store."""
    path = user_store().path
    return path.with_name(f"{path.stem}.missing.jsonl")


def add_missing(kind: Kind) -> None:
    missing_file().parent.mkdir(parents=True, exist_ok=True)
    with missing_file().open("a") as file:
        file.write(json.dumps(asdict(kind)) + "\n")


def missing() -> list[Kind]:
    """The kinds of calls, of all processes, that found no tuning; each once."""
    if not missing_file().is_file():
        return []
    lines = [json.loads(line) for line in missing_file().read_text().splitlines() if line.endswith("}")]
    return list(dict.fromkeys(Kind(**f | {"shapes": tuple(map(tuple, f["shapes"]))}) for f in lines))


def winners(stores: Sequence[Store]) -> dict[Kind, Winner]:
    """The last result for each kind; a later store wins over an earlier one."""
    return {r.kind: r for store in stores for r in store.records() if isinstance(r, Winner)}


def merge(sources: Iterable[Store], target: Store) -> int:
    """Append the records of `sources` that `target` does not have; return how many."""
    known = {repr(r) for r in target.records()}
    added = 0
    for record in (r for source in sources for r in source.records()):
        if repr(record) not in known:
            known.add(repr(record))
            target.append(record)
            added += 1
    return added
