"""`bagu lab`: list and run labs, and write their page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.options import LabResults, group

lab = group("Labs: measure a textbook claim on this machine.")


@lab.command("list")
def lab_list() -> None:
    """List every lab with its claim."""
    from rich.console import Console

    from bagu.lab.listing import list_labs

    list_labs(Console())


@lab.command("run")
def lab_run(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The labs to run. Default: all.")] = None,
    out: LabResults = Path("labs"),
    quick: Annotated[bool, Option("--quick", help="Use smaller sizes: a few seconds per lab.")] = False,
) -> None:
    """Measure claims, plot the results and print whether each claim holds."""
    from bagu.lab.run import run_labs

    raise typer.Exit(run_labs(names or (), out=out, quick=quick))


@lab.command("report")
def lab_report(out: LabResults = Path("labs")) -> None:
    """Write one HTML page with all lab results of this machine."""
    from bagu.lab.report import write_report

    typer.echo(write_report(out))
