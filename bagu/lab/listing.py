"""`bagu lab list`. Imports no lab and not torch."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from bagu.errors import UnknownName
from bagu.lab import catalogue
from bagu.lab.core import Result
from bagu.machine.terminal import counted


def list_labs(console: Console, *, theme: str | None = None, long: bool = False, missing: Path | None = None) -> None:
    """Print a line for each lab by theme; with `long` its texts. `missing` is a folder of results: only labs without a
    full result there that their code still gives are listed."""
    if theme is not None and theme not in catalogue.THEMES:
        raise UnknownName.among("theme", theme, catalogue.THEMES)
    have = set() if missing is None else up_to_date(missing)
    shown = [n for n in catalogue.sources() if n not in have and theme in (None, catalogue.theme_of(n))]
    width = max(map(len, shown), default=0)
    for part in dict.fromkeys(map(catalogue.theme_of, shown)):
        console.print(f"[bold]{part}[/]")
        lines = []
        for name in (n for n in shown if catalogue.theme_of(n) == part):
            lab = catalogue.words(name, whole=long)
            if long:
                describe(console, name, lab)
                continue
            line = Text(f"  {name:<{width}}  {'[GPU] ' if lab['needs_gpu'] else ''}{lab['claim_en']}")
            line.truncate(console.width, overflow="ellipsis")
            lines.append(line)
        if lines:  # at once: a call takes 1 ms
            console.print(Text("\n").join(lines), no_wrap=True)
    count = counted(len(shown), "lab")
    console.print(f"{count}{' without a full, current result' if missing else ''}. Run: bagu lab run NAME…")


def describe(console: Console, name: str, lab: dict[str, object]) -> None:
    console.print(f"\n[bold]{name}[/] · {escape(str(lab['title_en']))} · {escape(str(lab['title_zh']))}")
    console.print(f"“{escape(str(lab['claim_en']))}”\n“{escape(str(lab['claim_zh']))}”")
    need = ", needs a GPU" if lab["needs_gpu"] else ""
    console.print(f"[dim]{escape(str(lab['regime']))} Decided by {lab['evidence']}{need}.[/]")


def up_to_date(folder: Path) -> set[str]:
    """The labs with a full result in the folder, of any machine, from the code that the lab has now."""
    found = set()
    for path in folder.glob("*/*/result.json"):
        result = Result.read(path)
        name = result.lab.name
        if name in catalogue.sources() and not result.quick and result.code == catalogue.code_digest(name):
            found.add(name)
    return found
