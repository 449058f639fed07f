"""The passages of one request: found for its last question, sent with it, and cited by the answer.

A question is sent as `retrieve.conversation.with_passages` writes it, and a later request that repeats the sources of
earlier turns has their questions written in the same way: so its prompt begins with the tokens of the earlier one, and
the prefix cache has them. Numbers go on from turn to turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bagu.retrieve.cite import citations
from bagu.retrieve.prompt import fitting, with_passages
from bagu.serve.http.files_api.bodies import SentSource

if TYPE_CHECKING:  # it imports numpy, which the HTTP process starts without
    from bagu.serve.http.files_api.library import Found

DEFAULT_RESULTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A passage as the client sees it."""

    file_id: str
    file: str
    store: str
    line: int
    score: float
    text: str
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Found) -> Source:
        passage = found.hit.passage
        return cls(
            file_id=found.file_id,
            file=passage.file,
            store=found.store,
            line=passage.line,
            score=found.hit.score,
            text=passage.text,
            attributes=passage.attributes,
        )

    @classmethod
    def sent(cls, given: SentSource) -> Source:
        return cls(
            file_id=given.file_id,
            file=given.filename,
            store=given.vector_store_id,
            line=given.line,
            score=given.score,
            text=given.text,
        )

    @property
    def place(self) -> str:
        return f"{self.file}#L{self.line}-L{self.line + self.text.count(chr(10))}"

    def body(self, number: int) -> dict[str, Any]:
        return {"number": number, "vector_store_id": self.store, "line": self.line, **self.result()}

    def result(self) -> dict[str, Any]:
        """As in `results` of a file_search_call."""
        about = {"file_id": self.file_id, "filename": self.file, "score": self.score}
        return {**about, "text": self.text, "attributes": dict(self.attributes)}


class Turn:
    """What one request reads. `earlier` are the sources of earlier turns, from number 1."""

    def __init__(self, question: str, found: Sequence[Found], earlier: Sequence[Source]) -> None:
        self.question, self.earlier = question, list(earlier)
        self._found = [Source.of(one) for one in found]
        self.sources: list[Source] = []  # those that were sent

    def message(self, longest: int) -> str:
        """The question with as many passages as fit a model whose longest sequence has this many tokens."""
        self.sources = fitting(self._found, longest)
        return with_passages(self.question, self.sources, len(self.earlier) + 1)

    def cited(self, text: str) -> list[dict[str, Any]]:
        """The citations of an answer whose passage exists, with the number, the place in the text and the source."""
        known = dict(enumerate([*self.earlier, *self.sources], 1))
        found = []
        for one in citations(text, known):
            if (source := known.get(one.number)) is not None:
                place = {"start": one.start, "end": one.end, "number": one.number}
                found.append({**place, "source": source, "verified": one.verified, "why": one.why})
        return found

    def file_citations(self, text: str) -> list[dict[str, Any]]:
        """As annotations of a response. `number`, `verified` and `why` are not OpenAI's."""
        return [
            {
                "type": "file_citation",
                "file_id": c["source"].file_id,
                "filename": c["source"].file,
                "index": c["start"],
                "number": c["number"],
                "verified": c["verified"],
                "why": c["why"],
            }
            for c in self.cited(text)
        ]

    def url_citations(self, text: str) -> list[dict[str, Any]]:
        """As annotations of a chat completion, whose only kind is the citation of a URL."""
        return [
            {
                "type": "url_citation",
                "url_citation": {
                    "start_index": c["start"],
                    "end_index": c["end"],
                    "title": c["source"].file,
                    "url": f"bagu:{c['source'].place}",
                },
                "number": c["number"],
                "verified": c["verified"],
                "why": c["why"],
            }
            for c in self.cited(text)
        ]

    def source_bodies(self) -> list[dict[str, Any]]:
        return [source.body(number) for number, source in enumerate(self.sources, len(self.earlier) + 1)]


def as_sent(messages: Sequence[dict[str, Any]], first: int = 0) -> list[Source]:
    """Write each question that names its `sources`, or whose answer does, as it was sent, in place; returns all of
    them. `first` are known already."""
    earlier: list[Source] = []
    question: dict[str, Any] | None = None
    for message in messages:
        if message["role"] == "user":
            question = message
        sources = [Source.sent(one) for one in message.pop("sources", None) or ()]
        if sources and question is not None:
            question["content"] = with_passages(str(question["content"]), sources, first + len(earlier) + 1)
            earlier += sources
    return earlier
