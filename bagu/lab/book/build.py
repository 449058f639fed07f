"""`bagu book`: write the pages.

The pages open from file://. They load book.css, book.js and, when someone searches, index.js from their own folder and
nothing else; a content security policy holds them to that. Both languages are in each page, and the style sheet shows
one of them.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bagu.lab.book.content import ORDER, Entry, Kept, chapters, claims, week
from bagu.lab.book.markdown import documents
from bagu.lab.book.mathml import mathml
from bagu.lab.book.source import ROOT, code
from bagu.lab.core import CLASS, WORD_ZH, Row, Text
from bagu.lab.drill import catalogue as drills
from bagu.lab.drill.words import TOPIC_NAMES
from bagu.lab.svg import inline
from bagu.runs.html import grid

ROWS = 40  # of a result that are printed; the rest is in the record
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'"


class Written(NamedTuple):
    folder: Path
    pages: int
    labs: int
    records: int
    seconds: float
    size: int  # bytes


class Book:
    """The pages under `folder`, made from the results under `results`."""

    def __init__(self, folder: Path, results: Sequence[Path]) -> None:
        self.folder = folder
        self.chapters = chapters(results)
        self.entries = {entry.name: entry for chapter in self.chapters for entry in chapter.entries}
        self.documents = documents(ROOT)
        self.index: list[list[str]] = []  # of the search: address, titles, kind, text
        self.pages = 0
        self.environment = Environment(
            loader=PackageLoader("bagu.lab.book"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.environment.globals |= {
            "t": both, "say": say, "math": lambda source: Markup(mathml(source, block=True)), "code": code,
            "plot": plot, "rows": rows, "css": CLASS, "word": lambda kind: Text(kind, WORD_ZH[kind]),
            "chapters": self.chapters, "entries": self.entries, "drills": drills.written(), "topics": TOPIC_NAMES,
            "documents": self.documents, "claims": claims(), "policy": POLICY, "raw": Markup,
        }  # fmt: skip

    def page(self, path: str, template: str, title: Text, kind: Text | None = None, **values: Any) -> None:
        """Write one page; one with a `kind` is found by the search."""
        up = "../" * path.count("/")
        text = self.environment.get_template(template).render(title=title, up=up, path=path, **values)
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        self.pages += 1
        if kind is not None:
            main = text[text.index("<main") : text.index("</main>")]
            self.index.append([path, title.en, title.zh, kind.en, kind.zh, plain(main)])

    def write(self) -> None:
        order = list(self.entries.values())
        counts = Counter(entry.kind for entry in order if entry.kind)
        self.page(
            "index.html",
            "index.html",
            Text("Textbook claims, measured", "八股，逐条实测"),
            counts=counts,
            wrong=striking(order),
        )
        for chapter in self.chapters:
            self.page(f"chapters/{chapter.theme}.html", "chapter.html", chapter.title, CHAPTER, chapter=chapter)
        for i, entry in enumerate(order):
            beside = (order[i - 1] if i else None, order[i + 1] if i + 1 < len(order) else None)
            self.page(
                f"labs/{entry.name}.html",
                "lab.html",
                entry.title,
                LAB,
                entry=entry,
                beside=beside,
                chapter=next(c for c in self.chapters if c.theme == entry.theme),
            )
        self.page("wrong.html", "wrong.html", Text("Where the notes are wrong", "笔记错在哪里"), CHAPTER)
        self.page("week.html", "week.html", Text("A week with this book", "一周读完"), CHAPTER, days=week())
        self.page("questions.html", "questions.html", Text("What interviewers ask", "面试官会问什么"))
        self.page("drills.html", "drills.html", Text("Written by hand", "手撕代码"), CHAPTER)
        self.page("machines.html", "machines.html", Text("The machines", "测量所用的机器"), machines=machines(order))
        for document in self.documents:
            self.page(f"{document.path}.html", "document.html", document.title, DOCUMENT, document=document)
        self.page("print.html", "print.html", Text("The whole book", "全书（打印）"))
        for name in ("book.css", "book.js"):
            (self.folder / name).write_bytes((files("bagu.lab.book") / name).read_bytes())
        index = json.dumps(self.index, ensure_ascii=False, separators=(",", ":"))
        (self.folder / "index.js").write_text(f"window.BOOK = {index};\n", encoding="utf-8")


CHAPTER, LAB, DOCUMENT = Text("chapter", "章节"), Text("lab", "实验"), Text("document", "文档")


def write_book(folder: Path, results: Sequence[Path]) -> Written:
    """Write the book of the results under `results` to `folder`."""
    start = time.perf_counter()
    book = Book(folder, [path for path in results if path.exists()])
    book.write()
    kept = sum(len(entry.kept) for entry in book.entries.values())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return Written(folder, book.pages, len(book.entries), kept, time.perf_counter() - start, size)


def say(text: str) -> Markup:
    """A text with `code` and $formulas$ in it."""
    parts = re.split(r"`([^`]+)`|\$([^$]+)\$", text)
    out = []
    for i in range(0, len(parts), 3):
        out.append(escape(parts[i], quote=False))
        if i + 2 < len(parts):
            mono, formula = parts[i + 1 : i + 3]
            out.append(f"<code>{escape(mono)}</code>" if mono else mathml(formula))
    return Markup("".join(out))


def both(text: Text | tuple[str, str], tag: str = "span") -> Markup:
    """A text in both languages, of which the page shows one."""
    en, zh = text
    return Markup(f'<{tag} lang="en">{say(en)}</{tag}><{tag} lang="zh">{say(zh)}</{tag}>')


def plot(kept: Kept, *, page: str = "") -> Markup:
    if kept.plot is None:
        return Markup("")
    prefix = f"{page}{crc32(f'{kept.result.lab.name} {kept.result.machine}'.encode()):x}"  # short: hundreds of ids
    return Markup(inline(kept.plot.read_text(encoding="utf-8"), prefix=prefix))


def rows(found: Sequence[Row]) -> Markup:
    keys = list(dict.fromkeys(key for row in found for key in row))
    return Markup(grid([key.replace("_", " ") for key in keys], [[r.get(k) for k in keys] for r in found[:ROWS]]))


def plain(html: str) -> str:
    """The words of a page, for the search."""
    html = re.sub(r"<(svg|pre|script|table|nav|math)\b.*?</\1>", " ", html, flags=re.DOTALL)
    text = re.sub(r"<[^>]+>", " ", html)
    for entity, letter in (("&lt;", "<"), ("&gt;", ">"), ("&#34;", '"'), ("&#39;", "'"), ("&amp;", "&")):
        text = text.replace(entity, letter)
    return " ".join(text.split())


def striking(order: Sequence[Entry]) -> list[Entry]:
    """The labs for the cover: claims that anyone repeats, those that did not hold first."""
    first = [claim.lab for claim in claims() if claim.wrong and claim.lab]
    known = {entry.name: entry for entry in order if entry.kind}
    found = [known[name] for name in dict.fromkeys(first) if name in known]
    return sorted(found, key=lambda entry: ORDER[entry.kind])[:6]


def machines(order: Sequence[Entry]) -> Mapping[str, list[Kept]]:
    """The results by machine."""
    found: dict[str, list[Kept]] = {}
    for kept in (kept for entry in order for kept in entry.kept):
        found.setdefault(kept.result.machine, []).append(kept)
    return dict(sorted(found.items()))
