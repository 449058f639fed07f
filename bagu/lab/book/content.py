"""What the book is made of: labs with their words and records, claims, chapters. Imports neither torch nor a lab.

words/THEME.toml   for each lab: why one would believe the claim, formula, functions, questions; 中文 of the setup
claims.toml        the claims of the notes, each with what is true, and its lab or the reason that there is none
chapters.toml      the order of the chapters, and the reading path
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from bagu.errors import BaguError
from bagu.lab import catalogue
from bagu.lab.core import Result, Text
from bagu.lab.draw import FILES

NONE = Text("", "")
ORDER = {"did not hold": 0, "holds only where": 1, "held": 2, "not decided": 3}


class Question(NamedTuple):
    asked: Text
    answer: Text


class Kept(NamedTuple):
    """A result and the file of its plot, None if it has none."""

    result: Result
    plot: Path | None

    @property
    def stale(self) -> bool:
        return self.result.code != catalogue.code_digest(self.result.lab.name)

    @property
    def date(self) -> str:
        return str(self.result.environment.get("time", ""))[:10]


@dataclass(frozen=True, kw_only=True)
class Words:
    """What the book says of a lab besides its claim."""

    why: Text = NONE
    formula: str = ""
    setup_zh: str = ""
    code: Sequence[str] = ()
    questions: Sequence[Question] = ()
    drill: str = ""
    doc: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A lab in the book."""

    name: str
    theme: str
    lab: Mapping[str, Any]
    words: Words
    kept: Sequence[Kept] = ()

    @cached_property
    def kind(self) -> str:
        """The verdict that stands for the lab: of a full run before a quick one, decided before open."""
        found = sorted(self.kept, key=lambda k: (k.result.quick, k.result.verdict.kind == "not decided", k.stale))
        return found[0].result.verdict.kind if found else ""

    @property
    def title(self) -> Text:
        return Text(self.lab["title_en"], self.lab["title_zh"])

    @property
    def claim(self) -> Text:
        return Text(self.lab["claim_en"], self.lab["claim_zh"])


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the notes, what is true, and who shows it: a lab, or a reason with its source."""

    id: str
    said: Text
    truth: Text = NONE
    lab: str = ""
    reason: Text = NONE
    wrong: bool = False


@dataclass(frozen=True, kw_only=True)
class Chapter:
    theme: str
    title: Text
    intro: Text
    entries: Sequence[Entry] = field(default_factory=list)


def _toml(name: str) -> dict[str, Any]:
    return tomllib.loads((files("bagu.lab.book") / name).read_text(encoding="utf-8"))


def _text(pair: Sequence[str]) -> Text:
    en, zh = pair
    return Text(en.strip(), zh.strip())


@cache
def words() -> dict[str, Words]:
    """What the book says of each lab, by the lab's name."""
    found: dict[str, Words] = {}
    for file in sorted((files("bagu.lab.book") / "words").iterdir(), key=lambda f: f.name):
        for name, row in tomllib.loads(file.read_text(encoding="utf-8")).items():
            questions = [Question(Text(*four[:2]), Text(*four[2:])) for four in row.pop("questions", ())]
            if name in found:
                raise BaguError(f"{file.name} has the lab {name} again")
            found[name] = Words(**row | {"why": _text(row.get("why", ("", ""))), "questions": questions})
    return found


@cache
def claims() -> list[Claim]:
    pairs = ("said", "truth", "reason")
    rows: list[dict[str, Any]] = _toml("claims.toml")["claim"]
    return [Claim(**row | {key: _text(row[key]) for key in pairs if key in row}) for row in rows]


def records(folders: Sequence[Path]) -> dict[str, list[Kept]]:
    """The results under `folders` by lab: of each machine the latest full one, else the latest quick one."""
    best: dict[tuple[str, str], Kept] = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*/*/result.json"))):
        result, plot = Result.read(path), path.with_name(FILES[0])
        key, kept = (result.lab.name, result.machine), Kept(result, plot if plot.exists() else None)
        if key not in best or _rank(kept) >= _rank(best[key]):
            best[key] = kept
    found: dict[str, list[Kept]] = {}
    for name, machine in sorted(best):
        found.setdefault(name, []).append(best[name, machine])
    return found


def _rank(kept: Kept) -> tuple[bool, str]:
    return not kept.result.quick, str(kept.result.environment.get("time", ""))


def chapters(folders: Sequence[Path]) -> list[Chapter]:
    """The chapters with every lab of the catalogue; a theme without a title of its own gets its name."""
    kept, said = records(folders), _toml("chapters.toml")["chapter"]
    order = [row["theme"] for row in said]
    titles = {row["theme"]: row for row in said}
    found = []
    for theme in sorted(catalogue.THEMES, key=lambda t: order.index(t) if t in order else len(order)):
        row = titles.get(theme, {"title": (theme.replace("_", " ").capitalize(), theme), "intro": ("", "")})
        entries = [
            Entry(
                name=name,
                theme=theme,
                lab=catalogue.words(name),
                words=words().get(name, Words()),
                kept=kept.get(name, ()),
            )
            for name in catalogue.sources()
            if catalogue.theme_of(name) == theme
        ]
        found.append(Chapter(theme=theme, title=_text(row["title"]), intro=_text(row["intro"]), entries=entries))
    return found


def week() -> list[dict[str, Any]]:
    """The reading path: a title, a text and labs for each day."""
    return [
        {"title": _text(day["title"]), "text": _text(day["text"]), "labs": day["labs"], "drills": day["drills"]}
        for day in _toml("chapters.toml")["day"]
    ]
