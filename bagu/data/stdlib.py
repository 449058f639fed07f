"""The corpus every Python carries: the standard library that runs bagu, as text and as docstring-to-function pairs.

Without its tests (many systems leave them out) CPython 3.11's has 732 files, 12 MB. Versions differ, so the report of
a run names the Python and the corpus hash.
"""

from __future__ import annotations

import ast
import io
import platform
import re
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.data.source import Conversation, Document, describe_files, list_files, non_empty, read
from bagu.errors import BaguError

__all__ = ["StdlibSource", "sft_pairs"]

INSTALLED = {"site-packages", "dist-packages", "__pycache__"}  # not the standard library, though under its folder
TESTS = {"test", "tests", "idle_test"}
BUILT = re.compile(r"(^|/)(_sysconfigdata|config-)")  # written by the build, with this machine's paths in them


@dataclass(frozen=True)
class StdlibSource:
    """The modules under `root` (default: the running Python's library), sorted by path; a module is a document.

    A file that Python itself could not decode is left out: `Lib/test` has some, made to be broken.
    """

    root: Path | None = None
    include_tests: bool = False

    def documents(self) -> Iterator[Document]:
        texts = ((name, decoded(read(path))) for name, path in self.files())
        return non_empty((Document(id=name, text=text) for name, text in texts if text), self.folder)

    def describe(self) -> dict[str, Any]:
        files = self.files()
        undecodable = sum(decoded(read(path)) is None for _, path in files)
        return {
            **describe_files("Python standard library", files),
            "undecodable_files": undecodable,
            "python": platform.python_version(),
        }

    @property
    def folder(self) -> Path:
        return self.root or Path(sysconfig.get_paths()["stdlib"])

    def files(self) -> list[tuple[str, Path]]:
        """(relative path, path) of every module, sorted."""
        skipped = INSTALLED if self.include_tests else INSTALLED | TESTS
        if not self.folder.is_dir():
            hint = "it may be inside a zip file; train on text of your own instead"
            raise BaguError(f"this Python's library is not a folder of files: {self.folder}", hint=hint)
        return [
            (name, path)
            for name, path in list_files(self.folder, "**/*.py")
            if skipped.isdisjoint(name.split("/")[:-1]) and not BUILT.search(name)
        ]


def decoded(data: bytes) -> str | None:
    """Source code as text by the rules Python reads it by (PEP 263, newlines to \\n); None if those fail."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, UnicodeDecodeError):
        return None


def sft_pairs(documents: Iterable[Document], *, max_bytes: int = 1024) -> Iterator[Conversation]:
    """Chats made from the functions of Python modules: asked by name and docstring, answered by the code.

    Functions and methods that have a docstring and something after it, of at most `max_bytes` as an answer, in the
    order of the file. It takes documents, not a source, so that the pairs of held-out files stay held out.
    """
    for document in documents:
        lines = document.text.split("\n")  # as `ast` counts them; splitlines() also cuts at form feeds
        answers: set[str] = set()  # a platform's two branches may define one function twice
        for function in functions(parsed(document.text)):
            summary = (ast.get_docstring(function) or "").strip().split("\n\n")[0]
            answer = without_docstring(function, lines, max_bytes) if summary else None
            if answer is None or answer in answers:
                continue
            answers.add(answer)
            question = f"Write the Python function `{function.name}`.\n{summary}"
            messages = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
            yield Conversation(id=f"{document.id}:{function.lineno}:{function.name}", messages=messages)


def functions(node: ast.AST | None) -> Iterator[ast.FunctionDef]:
    """All functions and methods in file order. Only statements are looked into: there are fewer of them than nodes."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        statements = getattr(node, block, None)
        for statement in statements if isinstance(statements, list) else ():
            if isinstance(statement, ast.FunctionDef):
                yield statement
            yield from functions(statement)


def without_docstring(function: ast.FunctionDef, lines: list[str], max_bytes: int) -> str | None:
    """The function's code from `def` on, dedented, its docstring cut out.

    None when nothing is left, when it is longer than `max_bytes`, or when cutting out lines changes the code: where the
    docstring shares a line with code, or where a string spans lines and dedenting reaches into it.
    """
    docstring, *body = function.body
    kept = lines[function.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : function.end_lineno]
    answer = textwrap.dedent("\n".join(kept)).rstrip()
    if not body or len(answer.encode()) > max_bytes or (tree := parsed(answer)) is None:
        return None
    meant = ast.FunctionDef(**{**dict(ast.iter_fields(function)), "body": body, "decorator_list": []})
    return answer if [ast.dump(node) for node in tree.body] == [ast.dump(meant)] else None


def parsed(text: str) -> ast.Module | None:
    """The syntax tree; None when the text is not Python of this version."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old modules escape what needs no escape
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):  # ValueError: a null byte
            return None
