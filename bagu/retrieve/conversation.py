"""Passages in a conversation: a question is sent with what was found for it, and stays in the history as sent.

So the prompt of the next turn begins with the tokens of this one, and the prefix cache has them. Passages stand before
the question in the same message, because many chat templates refuse two messages of one role in a row. Their numbers
go on from turn to turn: [3] means the same passage in the whole conversation.
"""

from dataclasses import dataclass, field

from bagu.retrieve.cite import Citation, citations
from bagu.retrieve.core import Embedder, search
from bagu.retrieve.prompt import PASSAGES, fitting, with_passages
from bagu.retrieve.store import Passage, Store


@dataclass
class Conversation:
    """What was read for the questions so far, by number."""

    store: Store
    embedder: Embedder | None = None
    k: int = PASSAGES
    longest: int = 4096  # tokens of the model's longest sequence
    read: dict[int, Passage] = field(default_factory=dict)
    last: tuple[int, ...] = ()  # numbers of the last question

    def ask(self, question: str) -> str:
        """The message to send for a question; the question itself if nothing is found."""
        hits = search(self.store, question, self.k, embedder=self.embedder)
        chosen = fitting([hit.passage for hit in hits], self.longest)
        first = len(self.read) + 1
        self.last = tuple(range(first, first + len(chosen)))
        self.read |= dict(zip(self.last, chosen, strict=True))
        return with_passages(question, chosen, first)

    def check(self, answer: str) -> list[Citation]:
        return citations(answer, self.read)

    def sources(self, answer: str) -> list[str]:
        """A line for each passage that the answer cites or that was read for it."""
        if not self.last and not self.read:
            return [f"nothing found in {self.store.path}: the answer is the model's own"]
        cited = self.check(answer)
        lines = [] if self.last else [f"nothing found in {self.store.path} for this question"]
        for number in dict.fromkeys([*(c.number for c in cited), *self.last]):
            marks = [c for c in cited if c.number == number]
            wrong = next((c.why for c in marks if not c.verified), "")
            state = "read, not cited" if not marks else f"cited, not verified: {wrong}" if wrong else "cited, verified"
            place = self.read[number].place if number in self.read else "no such passage"
            lines.append(f"[{number}] {place} · {state}")
        return lines
