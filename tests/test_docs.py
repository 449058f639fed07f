"""References in the documents exist: relative links, the `file : symbol` of the walks, verbs and options of `bagu`."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from bagu.cli import app
from bagu.recipes.catalogue import RECIPES, recipe

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bagu/**/*.md")])
LINK = re.compile(r"\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s]+)\)")
SYMBOL = re.compile(r"`[^`]*\.py : (?P<symbol>[A-Za-z_][\w.]*)`")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(?:\.venv/bin/)?bagu ([a-z].*)", re.MULTILINE)


def links(document: Path) -> list[tuple[str, str]]:
    """(text, target) of the links to files of this repository."""
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    found = [(m["text"], m["target"]) for m in LINK.finditer(text)]
    return [(text, target) for text, target in found if not re.match(r"[a-z]+:|#", target)]


def defined(file: Path, symbol: str) -> bool:
    """Whether a Python file has this function, class or constant; `Class.method` is looked up in the class, and a lone
    name also in the classes of the file."""
    body: list[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    *owners, last = symbol.split(".")
    for owner in owners:
        body = next((n.body for n in body if isinstance(n, ast.ClassDef) and n.name == owner), [])
    if not owners:
        body = [*body, *(inner for n in body if isinstance(n, ast.ClassDef) for inner in n.body)]
    return last in {name for node in body for name in names(node)}


def names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_linked_files_exist(document: Path) -> None:
    missing = [t for _, t in links(document) if not (document.parent / t.partition("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_linked_symbols_exist(document: Path) -> None:
    named = [(m["symbol"], document.parent / target) for text, target in links(document) if (m := SYMBOL.search(text))]
    assert [f"{file.name} : {symbol}" for symbol, file in named if not defined(file, symbol)] == []


def test_a_missing_file_and_a_missing_symbol_are_found(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("class A:\n    def f(self): ...\n\nB: int = 1\nC, D = 1, 2\n")
    assert all(defined(tmp_path / "code.py", name) for name in ("A", "A.f", "f", "B", "C", "D"))
    assert not any(defined(tmp_path / "code.py", name) for name in ("g", "A.g", "E.f"))
    page = tmp_path / "page.md"
    page.write_text("[`code.py : A.f`](code.py#L1) [x](https://x.y/z) [top](#top)\n```\n[a](b.py)\n```\n[n](no.py)\n")
    assert links(page) == [("`code.py : A.f`", "code.py#L1"), ("n", "no.py")]
    found = SYMBOL.search("`serve/code.py : A.f`")
    assert found is not None and found["symbol"] == "A.f"


def commands(document: Path) -> list[list[str]]:
    """The words after `bagu` of every command in the code blocks, without comments."""
    blocks = "\n".join(FENCE.findall(document.read_text(encoding="utf-8"))).replace("\\\n", " ")
    return [shlex.split(m[1], comments=True) for m in COMMAND.finditer(blocks)]


@cache  # building every verb takes 0.1 s
def program() -> Any:
    return typer.main.get_command(app)


def unknown(words: list[str]) -> list[str]:
    """The words of a command that `bagu` does not know: its verb, or options."""
    command = program()
    while words and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    if hasattr(command, "commands") and words and not words[0].startswith("-"):
        return words[:1]
    options = {"--help", *(name for option in command.params for name in (*option.opts, *option.secondary_opts))}
    return [word for word in words if word.startswith("-") and word.partition("=")[0] not in options]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_verbs_and_options_of_commands_exist(document: Path) -> None:
    assert [(words, wrong) for words in commands(document) if (wrong := unknown(words))] == []


def test_a_missing_verb_and_a_missing_option_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nbagu serve M --prot 1   # --not\nbagu ops lst\n.venv/bin/bagu tun \\\n  ops\n```\nbagu prose --x\n"
    )
    assert [unknown(words) for words in commands(page)] == [["--prot"], ["lst"], ["tun"]]


def test_recipes_that_start_from_a_model_are_documented_with_their_settings() -> None:
    text = (ROOT / "docs/post_training.md").read_text(encoding="utf-8")
    runs = {name: recipe(name) for name in RECIPES}
    later = {name: run.objective for name, run in runs.items() if run.init_from is not None}
    assert [name for name in later if f"--recipe {name} " not in text] == []
    settings = {(o.kind, field.name) for o in later.values() if o.kind != "sft" for field in fields(o)}
    assert [(kind, name) for kind, name in settings if name != "kind" and f"objective.{name}" not in text] == []


def test_the_front_door_is_short_and_its_pictures_are_small() -> None:
    for name in ("README.md", "README.zh.md"):
        assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= 130, name
    assert all(path.stat().st_size <= 150_000 for path in (ROOT / "docs/pictures").iterdir())
