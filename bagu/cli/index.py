"""Verbs over documents: index, search."""

from typing import Any

import typer

from bagu.cli.found import check_files
from bagu.cli.options import takes
from bagu.retrieve.options import IndexOptions, SearchOptions


def embedder(name: str) -> Any:
    """A model that gives vectors: retrieve does not import recipes."""
    from bagu.recipes.embedder import ModelEmbedder

    return ModelEmbedder(name)


@takes(IndexOptions)
def index(given: IndexOptions) -> None:
    """Index documents, or bring an index up to date. It is one file, and safe to kill.

    Examples:
      bagu index docs/ src/ --out idx
      bagu index papers/ --out idx --embedder runs/embed
    """
    check_files(*given.paths)
    from bagu.retrieve.command import index_main

    raise typer.Exit(index_main(given, embedder))


@takes(SearchOptions)
def search(given: SearchOptions) -> None:
    """Find the passages of an index that answer a query.

    Examples:
      bagu search idx "how is a checkpoint written"
      bagu search idx 故乡 --explain
    """
    check_files(given.index)
    from bagu.retrieve.command import search_main

    raise typer.Exit(search_main(given, embedder))
