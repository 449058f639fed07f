"""`bagu process`: from a CSV to a model and to settings one may trust, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.help import Verbs

process = Verbs("Process data: a CSV in, settings one may trust or an honest refusal out.")

Data = Annotated[Path, Argument(metavar="DATA", help="A CSV file.")]
Target = Annotated[list[str] | None, Option(metavar="NAME:max|min", help="What to improve, e.g. yield:max.")]
Lang = Annotated[str, Option("--lang", help="en or zh.")]


@process.command()
def look(
    data: Data, target: Target = None, lang: Lang = "en",
    write: Annotated[bool, Option(help="Write the guessed roles to DATA.toml, unless it exists.")] = True,
) -> None:  # fmt: skip
    """Report what is wrong with a table, and write the guessed role of each column to a TOML file.

    Examples:
      bagu process look data.csv
      bagu process look data.csv --target yield:max --lang zh
    """
    from bagu.process.commands import look_lines

    for line in look_lines(data, target or (), lang, write=write):
        typer.echo(line)
