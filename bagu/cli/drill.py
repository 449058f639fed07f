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
    name: Name,
    level: Level = None,
    lang: Language = None,
    out: Annotated[Path, Option(help="The folder of answers.")] = Path("drills"),
) -> None:
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
    name: Name,
    level: Level = None,
    lang: Language = None,
    answer: Annotated[bool, Option("--answer", help="Print bagu's own answer; later grades get a *.")] = False,
) -> None:
    """Show the task and interviewers' questions; with --answer also bagu's own solution.

    Examples:
      bagu drill show softmax
      bagu drill show softmax --level triton --answer
    """
    from bagu.lab.drill.reading import described

    for line in described(name, level, lang, answer=answer):
        typer.echo(line)


@drill.command("time")
def time_file(file: File, name: DrillName = None) -> None:
    """Time a kernel over several shapes, beside bagu and torch; without a GPU, show what the compiler made of it.

    Examples:
      bagu drill time drills/softmax_triton.py
    """
    from bagu.lab.drill.commands import time_lines

    for line in time_lines(file, name):
        typer.echo(line)


@drill.command("try")
def try_file(
    file: File,
    name: DrillName = None,
    steps: Annotated[int, Option(help="Training steps of each run.", min=1)] = 50,
) -> None:
    """Train and serve a small model with the answer in place of bagu's part, beside bagu's own.

    Examples:
      bagu drill try drills/rms_norm.py
    """
    from bagu.lab.drill.commands import try_lines

    for line in try_lines(file, name, steps=steps):
        typer.echo(line)


@drill.command()
def bug(
    name: Name,
    level: Annotated[str | None, Option(help="The level. Default: triton where the drill has it.")] = None,
    seed: Annotated[int, Option(help="Which bug.", min=0)] = 0,
    out: Annotated[Path, Option(help="The folder of answers.")] = Path("drills"),
) -> None:
    """Write bagu's own kernel or answer with one planted bug: find it and mend it, in at most three lines.

    The file is graded before it is given, since a bug that no trial sees is none: some seconds for a kernel.

    Examples:
      bagu drill bug softmax --seed 7
    """
    from bagu.lab.drill import bugs, catalogue

    found = catalogue.drill(name)
    chosen = catalogue.level_of(found, level or bugs.default_level(found))
    file = bugs.write_bug(found, chosen, seed, out)
    typer.echo(f"{bugs.described(found, chosen)}\n{file}\nbagu drill check {file}")


@drill.command()
def predict(
    kind: Annotated[str, Argument(metavar="KIND", help="struct, generator, occupancy or bytes.")],
    seed: Annotated[int | None, Option(help="Which question. Default: a new one.")] = None,
    answer: Annotated[str | None, Option(help="Your answer; without it you are asked.")] = None,
    lang: Language = None,
) -> None:
    """Answer a small question whose answer is computed: a struct's size, a generator's output, occupancy, bytes.

    Examples:
      bagu drill predict struct
      bagu drill predict generator --seed 3
    """
    from random import randrange

    from bagu.lab.drill.core import language
    from bagu.lab.drill.predict import puzzle

    number = randrange(10**6) if seed is None else seed
    asked = puzzle(kind, number)
    typer.echo(asked.question(language(lang)))
    said = typer.prompt("answer") if answer is None else answer
    right = asked.right(said)
    typer.echo(f"{'right' if right else 'wrong'}: {asked.answer}   (--seed {number})")
    raise typer.Exit(0 if right else 1)


@drill.command()
def report(out: Annotated[Path, Option(help="The page.")] = Path("drills/report.html"), lang: Language = None) -> None:
    """Write your progress as a page: grades, what is due again, mistakes that come again.

    Examples:
      bagu drill report
    """
    from bagu.lab.drill.core import language
    from bagu.lab.drill.page import write_page

    typer.echo(write_page(out, language(lang)))
