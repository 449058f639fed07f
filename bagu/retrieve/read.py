"""The text of a file. What cannot be read raises `Unreadable`, one sentence that says why.

Plain text keeps its characters, so that offsets are those of the decoded file (without a byte order mark). HTML, JSON
and PDF become text first, and offsets are in that text.
"""

import html.parser
import io
import json
import logging
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.errors import BaguError

MAX_BYTES = 64 * 2**20
KINDS = {
    ".md": "markdown", ".markdown": "markdown", ".py": "python", ".pyi": "python", ".html": "html", ".htm": "html",
    ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".pdf": "pdf",
}  # fmt: skip
TEXTS = """
    txt text rst log csv tsv tex org adoc toml yaml yml ini cfg conf xml sql sh bash zsh c h cc cpp cxx hpp cu cuh java
    kt scala go rs js mjs ts tsx jsx css rb php pl lua r jl swift proto cmake mk srt vtt
"""
KINDS |= {f".{ending}": "text" for ending in TEXTS.split()}


class Unreadable(BaguError):
    """A file that is left out of an index."""


@dataclass(frozen=True, slots=True)
class Document:
    """A file that was read. `size` and `mtime` are those of the file before it was read."""

    text: str
    kind: str
    size: int
    mtime: int


def kind_of(name: str) -> str | None:
    """How files of this name are split; None for a kind that is not read."""
    return KINDS.get(Path(name).suffix.lower())


def read(path: Path) -> Document:
    try:
        before = path.stat()
        if not stat.S_ISREG(before.st_mode):
            raise Unreadable("it is not a regular file")
        if before.st_size > MAX_BYTES:
            raise Unreadable(f"it has {before.st_size:,} bytes, and at most {MAX_BYTES:,} are read: divide it")
        data = path.read_bytes()
        after = path.stat()
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or len(data) != after.st_size:
        raise Unreadable("it changed while it was read: run the command again")
    kind = kind_of(path.name) or "text"
    return Document(extract(data, kind), kind, before.st_size, before.st_mtime_ns)


def extract(data: bytes, kind: str) -> str:
    """The text in the bytes of a file of this kind."""
    if kind == "pdf":
        text = _pdf(data)
    elif kind in READERS:
        text = READERS[kind](decode(data))
    else:
        return decode(data)
    return text.encode(errors="replace").decode()  # JSON and PDF may hold halves of surrogate pairs


def decode(data: bytes) -> str:
    """UTF-8, UTF-16, UTF-32 or GB18030 (bagu/data/encoding.py)."""
    from bagu.data.encoding import (
        HEAD,
        binary_format,
        recognise,
    )  # its package imports numpy, which a server may not need

    content = recognise(data[:HEAD], complete=len(data) <= HEAD)
    if content == "binary":
        raise Unreadable(f"it is not text: {binary_format(data) or 'it holds zero bytes or other control characters'}")
    if content == "unknown":
        raise Unreadable("it is not UTF-8, UTF-16, UTF-32 or GB18030: convert it")
    try:
        text = data.decode(content)
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not {content.upper()}: byte {error.start}; convert it") from error
    if "\0" in text:
        raise Unreadable("it holds zero bytes, so it is not text")
    return text


class _Html(html.parser.HTMLParser):
    """The text that a browser would show, with line breaks at blocks."""

    BLOCKS = re.compile(r"p|div|br|li|tr|h[1-6]|section|article|header|footer|table|ul|ol|pre|blockquote|title")
    HIDDEN = frozenset(("script", "style", "template", "noscript"))

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.hidden += tag in self.HIDDEN
        if self.BLOCKS.fullmatch(tag):
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self.hidden -= tag in self.HIDDEN and self.hidden > 0
        if self.BLOCKS.fullmatch(tag):
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if not self.hidden:
            self.parts.append(data)


def _html(text: str) -> str:
    parser = _Html()
    parser.feed(text)
    parser.close()
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", re.sub(r"[ \t\r\f\v]+", " ", "".join(parser.parts))).strip()


def _json(text: str) -> str:
    try:
        return "\n".join(_lines(json.loads(text)))
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"it is not JSON: {error}") from error


def _jsonl(text: str) -> str:
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows.append("\n".join(_lines(json.loads(line))) if line.strip() else "")
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"line {number} is not JSON: {error}") from error
    return "\n\n".join(filter(None, rows))


def _lines(value: Any, name: str = "") -> Iterator[str]:
    """`name: value` for each leaf, so that escaped characters and keys can be found."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _lines(inner, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _lines(inner, name)
    elif value is not None:
        yield f"{name}: {value}" if name else str(value)


def _pdf(data: bytes) -> str:
    try:
        import pypdf
    except ImportError as error:
        raise Unreadable("reading PDF needs pypdf: pip install 'bagu[pdf]'") from error
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # what is wrong is said once, below
    try:
        pages = [page.extract_text() for page in pypdf.PdfReader(io.BytesIO(data)).pages]
    except Exception as error:  # pypdf raises its own errors, and KeyError, ValueError and others on broken files
        raise Unreadable(f"it is not a PDF that pypdf can read: {type(error).__name__}") from error
    if not any(page.strip() for page in pages):
        raise Unreadable(f"its {len(pages)} pages hold no text, as in a scan")
    return "\n\n".join(pages)


READERS: dict[str, Callable[[str], str]] = {"html": _html, "json": _json, "jsonl": _jsonl}
