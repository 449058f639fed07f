"""`bagu lab`: list and run labs, and write their page."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.help import Verbs
from bagu.cli.options import LabResults
from bagu.errors import UnknownName

lab = Verbs("Labs: measure a textbook claim on this machine.")


@lab.command("list")
def lab_list(
    theme: Annotated[str | None, Option(help="Only the labs of this theme.")] = None,
    long: Annotated[bool, Option("--long", help="Claims in both languages, regime, what decides.")] = False,
    missing: Annotated[bool, Option("--missing", help="Only labs without a full, current result in --out.")] = False,
    out: LabResults = Path("labs"),
) -> None:
    """List every lab with its claim, by theme.

    Examples:
      bagu lab list
      bagu lab list --theme serve --long
    """
    from bagu.lab.listing import list_labs
    from bagu.machine.terminal import Terminal

    list_labs(Terminal(highlight=False), theme=theme, long=long, missing=out if missing else None)


@lab.command("run")
def lab_run(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The labs to run.")] = None,
    every: Annotated[bool, Option("--all", help="Run every lab.")] = False,
    theme: Annotated[str | None, Option(help="Run the labs of this theme.")] = None,
    resume: Annotated[bool, Option("--resume", help="Skip labs whose current code has a result in --out.")] = False,
    out: LabResults = Path("labs"),
    quick: Annotated[bool, Option("--quick", help="Use smaller sizes: a few seconds per lab.")] = False,
    jobs: Annotated[
        int | None,
        Option(
            help="How many labs run at once; those that measure times run alone.",
            min=1,
            show_default="1; quick runs of many: one per core",
        ),
    ] = None,
) -> None:
    """Measure claims, plot the results and print whether each claim holds. Without a name: list the labs.

    Examples:
      bagu lab run safe_softmax
      bagu lab run --all --quick --resume
    """
    if not names and not every and theme is None:
        lab_list(None, long=False, missing=False, out=out)
        return
    if bool(names) + every + (theme is not None) > 1:
        raise typer.BadParameter("give the names of labs, --theme or --all: one of them")
    from bagu.lab import catalogue

    if theme is not None and theme not in catalogue.THEMES:
        raise UnknownName.among("theme", theme, catalogue.THEMES)
    if theme is not None:
        names = [name for name in catalogue.names() if catalogue.theme_of(name) == theme]

    for name in names or ():
        if name not in catalogue.names():  # before torch is imported
            raise UnknownName.among("lab", name, catalogue.names())
    from bagu.lab.run import default_jobs, run_labs

    many = every or theme is not None
    count = jobs or (default_jobs() if quick and many else 1)
    raise typer.Exit(run_labs(names or (), out=out, quick=quick, resume=resume, jobs=count))


@lab.command("report")
def lab_report(out: LabResults = Path("labs")) -> None:
    """Write one HTML page with all lab results of this machine.

    Examples:
      bagu lab report
      bagu lab report --out labs
    """
    from bagu.lab.report import write_report

    typer.echo(write_report(out))
