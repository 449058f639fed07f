"""Verbs over data: facts, pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.found import check_files
from bagu.cli.help import Verbs

data = Verbs("""Look at built-in data, and bring your own.

    Examples:
      bagu data pictures show umbrella
    """)
pictures = Verbs("""Pictures with names: glyphs of fonts, scenes, and your own.

    Examples:
      bagu data pictures show scenes
    """)
data.add_typer(pictures, name="pictures")


@data.command("facts")
def data_facts(
    out: Annotated[Path, Argument(help="The folder to write.")] = Path("facts"),
    seed: Annotated[int, Option(help="Of the names and values to train on; the documents are always the same.")] = 0,
) -> None:
    """Write made-up documents for the task lookup, and chats to train a model that reads them.

    Examples:
      bagu data facts facts
    """
    from bagu.retrieve.facts import write_facts

    write_facts(out, seed)
    typer.echo(f"written: {out}\nnext: bagu index {out}/docs --size 16 --out idx")


@pictures.command("show")
def pictures_show(
    words: Annotated[str, Argument(help="Part of a name in English or Chinese, or 'scenes'.")] = "scenes",
    out: Annotated[Path, Option(help="The PNG to write.")] = Path("pictures.png"),
    seed: Annotated[int, Option(help="Of places and colours.")] = 0,
) -> None:
    """Draw built-in pictures, one row per name and one column per font style.

    Examples:
      bagu data pictures show umbrella
      bagu data pictures show scenes --out scenes.png
    """
    from bagu.data.pictures.command import show

    for line in show(words, out, seed=seed):
        typer.echo(line)
    typer.echo(f"drawn: {out}")


@pictures.command("add")
def pictures_add(
    source: Annotated[Path, Argument(help="A folder of images, JSON lines of image and text, or a font.")],
    name: Annotated[str | None, Option(help="Its name in the cache. Default: that of the file.")] = None,
) -> None:
    """Check your own pictures with texts, and write the JSON lines that training reads.

    Examples:
      bagu data pictures add photos/
      bagu data pictures add NotoColorEmoji.ttf --name emoji
    """
    check_files(source)
    from bagu.data.pictures.command import add

    file, count = add(source, name)
    typer.echo(f"{count:,} pairs: {file}\nnext: bagu train {file} --recipe clip --out runs/clip")
