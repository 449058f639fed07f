"""The documents of the repository as pages: Markdown by markdown-it, links turned to the book's own pages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token

from bagu.lab.core import Text

OUTSIDE = re.compile(r"^[a-z]+:")


class Document(NamedTuple):
    """A page: its path in the book without suffix (`docs/parallel/zero`), its title, its body in each language.
    An empty zh says that there is no translation."""

    path: str
    title: Text
    body: Text


def documents(root: Path) -> list[Document]:
    """The documents under `root`/docs; [] where bagu is installed without them."""
    sources = sorted([*root.glob("docs/*.md"), *root.glob("docs/parallel/*.md")])
    sources = [f for f in sources if not f.name.endswith(".zh.md") and f.name != "README.md"]
    known = {f.relative_to(root).with_suffix("").as_posix() for f in sources}
    found = []
    for file in sources:
        path, other = file.relative_to(root).with_suffix("").as_posix(), file.with_suffix(".zh.md")
        en, body_en = page(file.read_text(encoding="utf-8"), path, known)
        zh, body_zh = page(other.read_text(encoding="utf-8"), path, known) if other.exists() else (en, "")
        found.append(Document(path, Text(en, zh), Text(body_en, body_zh)))
    return found


def page(source: str, path: str, known: set[str]) -> tuple[str, str]:
    """Title and HTML of a document at `path` of the book."""
    source = re.sub(
        r"^\(\[[^\]]*\]\([\w.]*\.md\)\)\n", "", source, flags=re.MULTILINE
    )  # the link to the other language
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(re.sub(r"<!--.*?-->", "", source, flags=re.DOTALL))
    title = next((tokens[i + 1].content for i, t in enumerate(tokens) if t.type == "heading_open"), path)
    for token in tokens:
        token.children = _linked(token.children or (), posixpath.dirname(path), known) if token.children else None
    html: str = parser.renderer.render(tokens, parser.options, {})
    html = re.sub(r"<table>.*?</table>", lambda m: f'<div class="scroll">{m[0]}</div>', html, flags=re.DOTALL)
    html = html.replace(' style="text-align:right"', ' class="number"')  # the pages' policy allows no inline style
    return re.sub(r"[`*]", "", title), re.sub(r' style="text-align:\w+"', "", html)


def _linked(tokens: Sequence[Token], folder: str, known: set[str]) -> list[Token]:
    """Links to documents go to their pages; links to files that are not in the book, and pictures, become text."""
    kept, dropped = [], 0
    for token in tokens:
        if token.type == "image":
            kept.append(Token("text", "", 0, content=token.content))
            continue
        if token.type == "link_open":
            target = str(token.attrs["href"]).partition("#")[0]
            aim = posixpath.normpath(posixpath.join(folder, target)).removesuffix(".md")
            if OUTSIDE.match(target):
                token.attrs["rel"] = "noreferrer"
            elif aim.removesuffix(".zh") in known:
                token.attrs["href"] = f"{posixpath.relpath(aim.removesuffix('.zh'), folder)}.html"
            else:
                dropped += 1
                continue
        if token.type == "link_close" and dropped:
            dropped -= 1
            continue
        kept.append(token)
    return kept
