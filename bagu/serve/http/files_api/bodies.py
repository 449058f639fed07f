"""Bodies of the vector store routes, and the fields by which a chat asks for passages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from bagu.retrieve.options import WEIGHTS
from bagu.retrieve.split import Chunking
from bagu.serve.http.bodies import fields
from bagu.serve.http.bodies.openai import Body, Word
from bagu.serve.http.errors import ApiError

PURPOSES = ("assistants", "user_data", "vision")  # of uploaded files
MAX_DEPTH = 8  # of filters in filters
Metadata = Annotated[  # OpenAI's limits
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Attributes = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)] | float | bool],
    Field(max_length=16),
]
Name = Annotated[str, Field(max_length=256)]
StoreIds = Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=16)]
Results = Annotated[int, Field(ge=1, le=50)]
COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "gte": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "lte": lambda a, b: a <= b,
    "in": lambda a, b: a in b,
    "nin": lambda a, b: a not in b,
}


class StaticSizes(Body):
    max_chunk_size_tokens: Annotated[int, Field(ge=100, le=4096)]
    chunk_overlap_tokens: Annotated[int, Field(ge=0, le=2048)]


class ChunkingStrategy(Body):
    type: Literal["auto", "static"]
    static: StaticSizes | None = None

    def chunking(self) -> Chunking:
        if self.static is None:
            return Chunking()
        size, overlap = self.static.max_chunk_size_tokens, self.static.chunk_overlap_tokens
        if 2 * overlap > size:
            param = "chunking_strategy.static.chunk_overlap_tokens"
            raise ApiError(400, f"{param} is {overlap}", param=param, hint=f"at most half of {size}")
        return Chunking(size=size, overlap=overlap)


class StoreBody(Body):
    """Creates a vector store."""

    unsupported: ClassVar[fields.Fields] = {"expires_after": ()}
    name: Name | None = None
    metadata: Metadata | None = None
    file_ids: Annotated[list[str], Field(fail_fast=True, max_length=100)] | None = None
    chunking_strategy: ChunkingStrategy | None = None


class StoreChange(Body):
    unsupported: ClassVar[fields.Fields] = {"expires_after": ()}
    name: Name | None = None
    metadata: Metadata | None = None


class StoreFileBody(Body):
    """Adds a file to a vector store."""

    file_id: str
    attributes: Attributes | None = None
    chunking_strategy: ChunkingStrategy | None = None


class Weights(Body):
    embedding_weight: Annotated[float, Field(ge=0, le=1e6)]
    text_weight: Annotated[float, Field(ge=0, le=1e6)]


class RankingOptions(Body):
    ranker: str | None = None  # accepted: there is one ranker
    score_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    hybrid_search: Weights | None = None


class SearchOptions(Body):
    """What a search of vector stores takes besides its query."""

    filters: dict[str, Any] | None = Field(
        None, description="a comparison {type, key, value} of attributes, or {type: and | or, filters}"
    )
    ranking_options: RankingOptions | None = None
    max_num_results: Results | None = None

    def arguments(self, place: str = "") -> dict[str, Any]:
        """For `Library.search`. Raises 400 for a wrong filter."""
        given = self.ranking_options or RankingOptions()
        weights = dict(WEIGHTS)
        if given.hybrid_search is not None:
            weights = {"words": given.hybrid_search.text_weight, "vectors": given.hybrid_search.embedding_weight}
        keep = None if self.filters is None else filter_of(self.filters, f"{place}filters")
        return {"keep": keep, "threshold": given.score_threshold or 0.0, "weights": weights}


class SearchBody(SearchOptions):
    unsupported: ClassVar[fields.Fields] = {"rewrite_query": (False,)}
    query: Annotated[
        Word | Annotated[list[Word], Field(fail_fast=True, min_length=1, max_length=16)],
        Field(description="a text, or a list of up to 16 texts"),
    ]

    @property
    def queries(self) -> list[str]:
        return [self.query] if isinstance(self.query, str) else self.query


class FileSearch(SearchOptions):
    """`file_search` of a chat, and the tool of this name of a response: the passages found for the last question are
    sent with it."""

    vector_store_ids: StoreIds


class FileSearchTool(FileSearch):
    type: Literal["file_search"]


class FileSearchChoice(Body):
    type: Literal["file_search"]


class SentSource(Body):
    """A passage that an earlier turn read, as the response named it: the turn is then rendered as it was sent."""

    filename: Name
    text: Annotated[str, Field(max_length=2**15)]
    file_id: str = ""
    vector_store_id: str = ""
    line: int = 0
    score: float = 0.0


Sources = Annotated[list[SentSource], Field(fail_fast=True, max_length=50)]


def filter_of(given: Any, place: str, depth: int = 0) -> Callable[[Mapping[str, Any]], bool]:
    """A filter of attributes; a file without the attribute does not pass, except "ne" and "nin"."""

    def wrong(what: str, hint: str) -> ApiError:
        return ApiError(400, f"{place}{what}", param=place, hint=hint)

    if not isinstance(given, dict) or depth > MAX_DEPTH:
        raise wrong(" is not a filter", f"an object with type, nested up to {MAX_DEPTH} times")
    kind, key, value = given.get("type"), given.get("key"), given.get("value")
    if kind in ("and", "or"):
        inner = given.get("filters")
        if not isinstance(inner, list) or not 1 <= len(inner) <= 64:
            raise wrong(".filters is not a list of filters", "1 to 64")
        several = [filter_of(one, f"{place}.filters.{i}", depth + 1) for i, one in enumerate(inner)]
        join = all if kind == "and" else any
        return lambda attributes: join(one(attributes) for one in several)
    if kind not in COMPARE or not isinstance(key, str):
        raise wrong(f" has the type {kind!r:.40} and the key {key!r:.40}", f"and, or, {', '.join(COMPARE)}; a string")
    plain, is_list = (str, int, float, bool), kind in ("in", "nin")
    if not (
        isinstance(value, list) and all(isinstance(v, plain) for v in value) if is_list else isinstance(value, plain)
    ):
        raise wrong(f".value is {value!r:.40}", "a list" if is_list else "a string, a number or true or false")

    compare = COMPARE[str(kind)]

    def passes(attributes: Mapping[str, Any]) -> bool:
        if key not in attributes:
            return kind in ("ne", "nin")
        try:
            return bool(compare(attributes[key], value))
        except TypeError:  # a string and a number have no order
            return False

    return passes
