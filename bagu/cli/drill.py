"""`bagu drill`: write a part by hand, have it graded, and run the stack with it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.help import Verbs

drill = Verbs("Drills: write a part by hand, be graded by the truth, run the stack with it.")

Name = Annotated[str, Argument(metavar="NAME", help="The drill (`bagu drill list`).")]
File = Annotated[Path, Argument(metavar="FILE", help="The file of the answer.")]
Level = Annotated[str | None, Option(help="The level, e.g. torch or triton. Default: the drill's first.")]
Language = Annotated[str | None, Option("--lang", help="en or zh. Default: by LANG.")]
DrillName = Annotated[str | None, Option("--drill", help="The drill, if the file's name does not say it.")]
Seed = Annotated[int | None, Option(help="Repeat the random inputs of an earlier check.")]


@drill.command("list")
def list_drills(
    lang: Language = None,
    zh: Annotated[bool, Option("--zh", help="The same as --lang zh.")] = False,
    every: Annotated[bool, Option("--all", help="Also the ops whose drill is made from the spec alone.")] = False,
) -> None:
    """List the drills by topic, with your grades and what is due again.

    Examples:
      bagu drill list
      bagu drill list --zh
    """
    from bagu.lab.drill.core import language
    from bagu.lab.drill.words import listing

    for line in listing("zh" if zh else language(lang), every=every):
        typer.echo(line)


@drill.command()
def start(
    name: Name, level: Level = None, lang: Language = None,
    out: Annotated[Path, Option(help="The folder of answers.")] = Path("drills"),
) -> None:  # fmt: skip
    """Write the stub of a drill; work is never written over.

    Examples:
      bagu drill start softmax --level triton
    """
    from bagu.lab.drill import catalogue, words
    from bagu.lab.drill.core import language

    found = catalogue.drill(name)
    file = words.start(found, catalogue.level_of(found, level), out, language(lang))
    typer.echo(f"{file}\nbagu drill check {file}")


@drill.command()
def check(file: File, name: DrillName = None, level: Level = None, seed: Seed = None, lang: Language = None) -> None:
    """Grade an answer against the truth: every case, the first failure with its reason, a guess of the cause.

    Examples:
      bagu drill check drills/softmax_triton.py
    """
    from bagu.lab.drill.commands import check_file

    raise typer.Exit(check_file(file, name, level, seed=seed, lang=lang))


@drill.command()
def hint(name: Name, lang: Language = None, every: Annotated[bool, Option("--all", help="All three.")] = False) -> None:
    """Show the next of three hints, from vague to exact.

    Examples:
      bagu drill hint softmax
    """
    from bagu.lab.drill.reading import next_hints

    for line in next_hints(name, lang, every=every):
        typer.echo(line)


@drill.command()
def show(
    name: Name, level: Level = None, lang: Language = None,
    answer: Annotated[bool, Option("--answer", help="Print bagu's own answer; later grades get a *.")] = False,
) -> None:  # fmt: skip
    """Show the task and interviewers' questions; with --answer also bagu's own solution.

    Examples:
      bagu drill show softmax
      bagu drill show softmax --level triton --answer
    """
    from bagu.lab.drill.reading import described

    for line in described(name, level, lang, answer=answer):
        typer.echo(line)
