"""The store of tunings: an append-only file of JSON lines, one line per measurement and one per result of a search.

An appended line is written by one `write` call to a file opened for appending, so several processes may write at once,
and a crash loses at most the line being written. Two stores merge by concatenation. A line that is cut off, or of
another version, is skipped and counted; the other lines are used.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bagu.errors import ArgumentError
from bagu.machine.cache import cache_folder

VERSION = 2
PREFIX = f'{{"version":{VERSION},"record":"'.encode()  # of every line

Options = Mapping[str, int | None]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]  # (name, shape) of each tensor, sorted by name


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The calls that a tuning is for: one step of an op at these shapes, on this device, with this source code."""

    op: str
    step: str  # "forward" or "backward"
    dtype: str  # of the tensors, each once, in the order of their names: "bfloat16, int64"
    shapes: Shapes
    modes: tuple[tuple[str, str], ...] = ()  # (name, value) of the scalars that select code: strings, bools, dtypes
    device: str  # its name
    source: str  # hash of the kernels' source (source.py)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of one set of options. A search measures each set several times, in turn.

    `status` is "ok", or why there is no time: "compile" (it does not compile), "failed" (the launch raised) or "wrong"
    (fast, but its results differ from the reference). Lines of searches with a cost model also have "resources",
    "spills" and "roofline": dropped before they were timed.
    """

    kind: Kind
    options: Options
    status: str
    reason: str = ""
    median_s: float | None = None
    low_s: float | None = None  # 20th and 80th percentile of the samples
    high_s: float | None = None
    samples: int = 0
    seconds: float = 0.0  # spent on it, compilation included
    dims: Mapping[str, int] = field(default_factory=dict)  # of the op's signature
    environment: Mapping[str, Any] = field(default_factory=dict)  # memory, driver, Triton, torch


@dataclass(frozen=True, kw_only=True)
class Winner:
    """The result of a search: the options to use. Empty options are the kernel's defaults.

    `verdict` is "faster", "no significant winner", or "wrong" if each faster set of options gave wrong results.
    """

    kind: Kind
    options: Options
    verdict: str
    speedup: float  # over the default; 1.0 unless the verdict is "faster"
    searched: int  # sets of options measured
    space: int  # sets of options in the space
    seconds: float
    dims: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


Record = Measurement | Winner
KINDS: dict[str, type[Record]] = {"measurement": Measurement, "winner": Winner}


@dataclass(frozen=True)
class Contents:
    """What a file holds, and one sentence if some of it cannot be used."""

    records: list[Record]
    problem: str | None


@dataclass(frozen=True)
class Store:
    """A file of records."""

    path: Path

    def append(self, record: Record) -> None:
        """Write one record at once. Raises if the file cannot be written."""
        name = next(n for n, kind in KINDS.items() if isinstance(record, kind))
        fields = {"version": VERSION, "record": name} | asdict(record) | {"kind": kind_fields(record.kind)}
        line = json.dumps(fields, separators=(",", ":")) + "\n"
        descriptor = self._opened()
        try:
            # a line that an earlier process left unfinished must not swallow this one
            end = os.lseek(descriptor, 0, os.SEEK_END)
            complete = end == 0 or os.pread(descriptor, 1, end - 1) == b"\n"
            os.write(descriptor, (line if complete else "\n" + line).encode())
        finally:
            os.close(descriptor)

    def check_writable(self) -> None:
        """Raise, before anything is measured, if records cannot be appended."""
        os.close(self._opened())

    def _opened(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ArgumentError(
                f"the tuning store {self.path} cannot be written: {error.strerror}",
                hint="set BAGU_TUNING to a file in a folder that can be written",
            ) from None

    def records(self) -> list[Record]:
        return self.read().records

    def read(self, only: str = "") -> Contents:
        """The records, or `only` those of one sort. Lines of other sorts are not parsed: most are measurements."""
        records: list[Record] = []
        good = bad = 0
        try:
            for line in self._lines():
                record = parse(line) if line.startswith(PREFIX + only.encode()) else None
                if record is not None:
                    records.append(record)
                usable = record is not None or (bool(only) and line.startswith(PREFIX) and line.endswith(b"}"))
                good, bad = good + usable, bad + (not usable)
        except OSError as error:
            return Contents([], f"the tuning store {self.path} cannot be read and is not used: {error.strerror}")
        if not bad:
            return Contents(records, None)
        lines = "1 line is" if bad == 1 else f"{bad} lines are"
        return Contents(
            records, f"the tuning store {self.path}: {lines} cut off or of another version; the other {good} are used"
        )

    def _lines(self) -> Iterator[bytes]:
        try:
            with self.path.open("rb") as file:
                yield from filter(None, map(bytes.strip, file))
        except FileNotFoundError:
            return


def kind_fields(kind: Kind) -> dict[str, Any]:
    """A kind as JSON values."""
    return asdict(kind) | {"shapes": dict(kind.shapes), "modes": dict(kind.modes)}


def parse_kind(fields: Mapping[str, Any]) -> Kind:
    shapes = tuple((name, tuple(int(n) for n in shape)) for name, shape in fields["shapes"].items())
    return Kind(**{**fields, "shapes": shapes, "modes": tuple(fields["modes"].items())})


def parse(line: bytes) -> Record | None:
    """The record of a line, or None if it has none of this version."""
    try:
        fields = json.loads(line)
        if fields.pop("version") != VERSION:
            return None
        made = KINDS[fields.pop("record")]
        known = {k: v for k, v in fields.items() if k in made.__dataclass_fields__}  # older lines have a prediction
        return made(**known | {"kind": parse_kind(fields["kind"])})
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def user_store() -> Store:
    """The file that `bagu tune ops` writes: $BAGU_TUNING, or tuning.jsonl in the cache folder."""
    given = os.environ.get("BAGU_TUNING")
    return Store(Path(given) if given and given != "off" else cache_folder() / "tuning.jsonl")


def shipped_store() -> Store:
    """The measurements that come with the package."""
    return Store(Path(__file__).parent / "shipped.jsonl")


def winners(records: Iterable[Record]) -> dict[Kind, Winner]:
    """The last result for each kind."""
    return {r.kind: r for r in records if isinstance(r, Winner)}


def merge(sources: Iterable[Store], target: Store) -> int:
    """Append the records of `sources` that `target` does not have; return how many."""
    added = 0
    for source in sources:
        known = Counter(map(repr, target.records()))
        for record in source.records():
            known[repr(record)] -= 1
            if known[repr(record)] < 0:  # two rounds of a search may have the same record
                target.append(record)
                added += 1
    return added
