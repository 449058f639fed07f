"""The task `lookup`: questions about made-up facts (bagu/data/facts.py), asked in three ways.

    lookup           with the passages that a search in the index finds, as `bagu chat --with` sends them
    lookup_given     with the one passage that has the answer
    lookup_without   alone

What retrieval is worth is the difference of the first and the last; what it loses, that of the first two. `bagu data
facts` writes the documents to index (bagu/retrieve/facts.py).
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bagu.data.facts import held_out
from bagu.eval.grades import each
from bagu.eval.model import Decoding
from bagu.eval.task import Item, Task, TaskError
from bagu.retrieve.cite import MARK, Citation, citations
from bagu.retrieve.prompt import PASSAGES, Shown, with_passages

ITEMS = 240
WAYS = ("lookup", "lookup_given", "lookup_without")
FORM = "Answers of one form, copied from a passage of two sentences; it shows reading and citing, not knowledge."
Find = Callable[[str], Mapping[int, Shown]]  # a question -> the passages to show, by number


def lookup_task(name: str, find: Find | None = None) -> Task:
    """One of WAYS; `find` searches the index for `lookup`."""
    entries = held_out()[:ITEMS]
    shown: dict[str, Mapping[int, Shown]] = {}

    def items() -> Iterator[Item]:
        for number, entry in enumerate(entries):
            fact = entry.facts[number % len(entry.facts)]
            if name == "lookup" and find is not None:
                shown[str(number)] = find(fact.question)
            else:
                shown[str(number)] = {1: entry} if name == "lookup_given" else {}
            asked = with_passages(fact.question, list(shown[str(number)].values()))
            yield Item(
                id=str(number),
                messages=({"role": "user", "content": asked},),
                answer=str(fact.value),
                facts={"fact": fact.sentence},
            )

    def marks(item: Item, text: str) -> list[Citation]:
        return citations(text, shown[item.id])

    def supported(item: Item, text: str) -> float:
        found = marks(item, text)
        return float(bool(found) and all(mark.verified for mark in found))

    def misplaced(item: Item, text: str) -> float:
        return float(any(m.passage is not None and item.facts["fact"] not in m.passage.text for m in marks(item, text)))

    measures = {
        "citations_verified": each(supported),
        "cites_another_passage": each(misplaced),
        "cites_no_passage": each(lambda item, text: float(any(m.passage is None for m in marks(item, text)))),
        "passage_shown": each(
            lambda item, text: float(any(item.facts["fact"] in p.text for p in shown[item.id].values()))
        ),
    }
    return Task(
        name=name,
        kind="generation",
        items=items,
        chat=True,
        metric="exact",
        grade=each(_right),
        limits=FORM,
        decoding=Decoding(max_tokens=24),
        judged="the one number outside of marks is the value",
        measures={} if name == "lookup_without" else measures,
    )


def _right(item: Item, text: str) -> float:
    return float(re.findall(r"\d+", MARK.sub("", text)) == [item.answer])


def finder(index: Path, longest: int, most: int = PASSAGES) -> Find:
    """The passages, at most so many, that `bagu chat --with` shows a model of `longest` tokens for a question."""
    from bagu.recipes.embedder import ModelEmbedder
    from bagu.retrieve.command import open_embedder
    from bagu.retrieve.conversation import Conversation
    from bagu.retrieve.store import Store

    store = Store(index, read_only=True)
    embedder = open_embedder(store, None, ModelEmbedder)

    def find(question: str) -> Mapping[int, Shown]:
        conversation = Conversation(store, embedder, k=most, longest=longest)
        conversation.ask(question)
        return conversation.read

    first = held_out()[0].facts[0]
    if not any(first.sentence in passage.text for passage in find(first.question).values()):
        raise TaskError(
            f"{index} does not find {first.question!r}: it is no index of the documents of `lookup`",
            hint="bagu data facts, then bagu index facts/docs --size 16 --out idx",
        )
    return find
