"""`bagu book`: the book of all claims."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option


def book(
    out: Annotated[Path, Option(help="The folder of the pages.")] = Path("book"),
    results: Annotated[list[Path] | None, Option(help="Results of labs. Default: labs and the recorded ones.")] = None,
) -> None:
    """Write every claim with its verdict, plot and questions as pages in English and 中文.

    The pages need no server: open book/index.html.

    Examples:
      bagu book
      bagu book --out book --results labs --results other_machine/labs
    """
    from bagu.lab.book.build import write_book
    from bagu.lab.book.source import RECORDED

    found = write_book(out, results or [RECORDED, Path("labs")])
    typer.echo(
        f"{found.folder / 'index.html'}: {found.pages} pages, {found.labs} labs, {found.records} records, "
        f"{found.size / 1e6:.1f} MB in {found.seconds:.1f} s"
    )
