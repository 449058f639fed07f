"""The files of a folder by what they hold, recognised by names and first bytes: rows of data, text, or neither."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bagu.data.encoding import HEAD, Content, recognise

DOCUMENTATION = ("readme", "license", "licence")  # in a folder of .json data, these are no text to train on
NAMED = 4  # kinds of files that a note names


@dataclass(frozen=True, kw_only=True)
class Files:
    """`text` are the files that can be read as text, but no .json files. `binary` and `unknown` (text in an encoding
    that is not recognised) are left out. `hidden` are folders and files whose names begin with a dot; they are
    not read.
    """

    parquet: Sequence[Path]
    json_lines: Sequence[Path]
    json: Sequence[Path]
    text: Sequence[Path]
    binary: Sequence[Path]
    unknown: Sequence[Path]
    hidden: Sequence[str]
    encodings: Counter[str]  # of text that is not UTF-8

    def note(self, used: Sequence[Path]) -> str:
        """What was left out and what was decoded, in one line; "" if nothing was."""
        found = [*self.parquet, *self.json_lines, *self.json, *self.text, *self.binary]
        chosen = set(used)
        kinds = Counter(file.suffix or file.name for file in found if file not in chosen)
        left = [f"{count:,} {kind}" for kind, count in kinds.most_common(NAMED)]
        others = sum(kinds.values()) - sum(count for _, count in kinds.most_common(NAMED))
        if others:
            left.append(f"{others:,} others")
        if self.unknown:
            left.append(f"{len(self.unknown):,} in an unknown encoding (such as {self.unknown[0]})")
        if self.hidden:
            left.append(f"hidden {', '.join(self.hidden[:NAMED])}{', …' * (len(self.hidden) > NAMED)}")
        notes = [f"left out: {', '.join(left)}"] if left else []
        if not chosen.isdisjoint(self.text):
            notes += [f"{count:,} decoded from {name.upper()}" for name, count in self.encodings.most_common()]
        return "; ".join(notes)


def look(folder: Path) -> Files:
    """Look at the files of `folder` and its sub-folders. Links to folders are not followed."""
    by_kind: dict[str, list[Path]] = {}
    hidden: list[str] = []
    encodings: Counter[str] = Counter()
    for file in _walk(folder, hidden):
        kind = kind_of(file.name)
        if kind == "text":
            content = _content(file)
            kind = content if content in ("binary", "unknown") else "text"
            if kind == "text" and not content.startswith("utf-8"):
                encodings[content] += 1
        by_kind.setdefault(kind, []).append(file)
    kinds = {kind: by_kind.get(kind, []) for kind in ("parquet", "json_lines", "json", "text", "binary", "unknown")}
    return Files(**kinds, hidden=sorted(hidden), encodings=encodings)


def kind_of(name: str) -> str:
    """The kind of a file by its name; every name that is not one of rows may be text."""
    plain = name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return "parquet"
    if ".jsonl" in name or plain.endswith(".ndjson"):
        return "json_lines"
    return "json" if plain.endswith(".json") else "text"


def is_documentation(file: Path) -> bool:
    return file.name.lower().startswith(DOCUMENTATION)


def _walk(folder: Path, hidden: list[str]) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if name.startswith("."):
                hidden.append((Path(place) / name).relative_to(folder).as_posix())
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (Path(place) / name for name in sorted(files) if not name.startswith("."))
        yield from (path for path in paths if path.is_file())


def _content(file: Path) -> Content:
    """A file that cannot be opened counts as text: reading it says why."""
    try:
        with file.open("rb") as opened:
            head = opened.read(HEAD)
    except OSError:
        return "utf-8"
    return recognise(head, complete=len(head) < HEAD)
