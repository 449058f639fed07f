"""What a verb prints arrives as it was written, brackets included."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.markup import escape
from rich.table import Table

import bagu
from bagu.machine.terminal import STYLES, Terminal, counted
from bagu.runs import plot_style

PACKAGE = Path(bagu.__file__).parent


def printed(*what: object) -> str:
    terminal = Terminal(file=io.StringIO(), width=200)
    for one in what:
        terminal.print(one)
    return terminal.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    ["pip install 'bagu[plot]'", "x[M, N] -> y[0]", "[GPU] runs/[a]/model", "[/home]", escape("a[red]b") + "[]"],
)  # fmt: skip
def test_brackets_are_printed(text: str) -> None:
    shown = text.replace("\\[", "[")
    assert printed(text) == shown + "\n"
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    assert printed(table).count(shown) == 3


def test_styles_are_styles() -> None:
    assert printed(*(f"[{style}]word[/] [{style}]word[/{style}]" for style in STYLES)) == "word word\n" * len(STYLES)


def test_the_hint_of_a_missing_plot_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    reason = plot_style.write_plot(lambda figure: None, tmp_path / "plot", (1, 1), {})
    assert "pip install 'bagu[plot]' and run again" in printed(f"[yellow]no plot[/]: {reason}")


def test_every_verb_prints_to_it() -> None:
    """Another console would drop words in brackets. The demo's prints only what it formats itself."""
    made = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if re.search(r"\bConsole\(", file.read_text()) and file.name != "terminal.py"
    }
    assert made <= {"recipes/demo.py"}
    styled = re.compile(r"\[(bold|dim|red|green|yellow|cyan|blue|magenta|italic|white)( \w+)*\]")
    used = {
        match[1] + (match[2] or "") for file in PACKAGE.rglob("*.py") for match in styled.finditer(file.read_text())
    }
    assert used <= set(STYLES)


def test_one_is_singular() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1200)] == ["0 steps", "1 step", "2 steps", "1,200 steps"]


WARNS = """
import sys, warnings
from bagu.cli import main

def verb() -> None:
    for number in range(3):
        with warnings.catch_warnings():  # as torch does; Python then forgets what it has shown
            warnings.simplefilter("ignore")
        warnings.warn("no compiler", RuntimeWarning)
    warnings.warn("another", RuntimeWarning)

sys.modules[main.__module__].app = lambda **options: verb()
main()
"""


def test_a_warning_is_shown_once_in_a_run() -> None:
    done = subprocess.run([sys.executable, "-c", WARNS], capture_output=True, text=True, check=True)
    assert done.stderr == "bagu: warning: no compiler\nbagu: warning: another\n"


def test_a_text_without_markup_is_printed_as_it_is() -> None:
    """The sources of an answer begin with [1]; a backslash stood before it."""
    terminal = Terminal(file=io.StringIO())
    terminal.print("[1] docs/a.md [bold]", markup=False)
    assert terminal.file.getvalue() == "[1] docs/a.md [bold]\n"  # type: ignore[attr-defined]
