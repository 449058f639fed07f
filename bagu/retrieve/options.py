"""The options of `bagu index` and `bagu search` (bagu/config/options.py). `--help` imports this file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bagu.config import options
from bagu.config.options import Argument, Option

WEIGHTS: Mapping[str, float] = {"words": 1.0, "vectors": 1.0}  # of the rankings that a search joins


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    paths: Annotated[
        tuple[Path, ...],
        Argument("Files and folders: text, Markdown, source code, HTML, JSON, JSON lines, PDF.", metavar="PATH"),
    ]
    out: Annotated[Path, Option("The index, one file. The same command again updates it.")] = Path("idx")
    embedder: Annotated[
        str | None, Option("Also store vectors, made by this model: bagu train --recipe contrastive.", metavar="MODEL")
    ] = None
    size: Annotated[int, Option("Longest passage, in estimated tokens.")] = 256
    overlap: Annotated[int, Option("Tokens that a passage repeats of the one before it.")] = 0
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    index: Annotated[Path, Argument("An index, from `bagu index`.", metavar="INDEX")]
    query: Annotated[str, Argument("Words or a question, in any language.", metavar="QUERY")]
    k: Annotated[int, Option("Number of passages.", flags=("-k",))] = 5
    embedder: Annotated[
        str | None, Option("Where the model of the vectors is, if it was moved. Default: as indexed.", metavar="MODEL")
    ] = None
    explain: Annotated[
        bool, Option("Print the rank in each ranking and the words that were found.", flags=("--explain",))
    ] = False
    as_json: Annotated[bool, options.AS_JSON] = False
