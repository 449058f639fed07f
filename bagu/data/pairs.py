"""One source of a run as pairs of a query and the passage that answers it: rows of a table, or the first paragraph of
a docstring and the function's code.

Pairs are stored as preferences are (preferences.py): the query is the document whose id ends with "+", the passage the
next one, which ends with "-".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bagu.data.corpus import Part
from bagu.data.split import held_ids
from bagu.data.stdlib import documented_functions
from bagu.data.store import TokenDocument, TokenStore
from bagu.data.store_writer import on_disk
from bagu.data.table_corpus import TableCorpus
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError

FIELDS = (("query", "passage"), ("anchor", "positive"), ("question", "answer"))


@dataclass(frozen=True)
class Pair:
    id: str
    query: str
    passage: str


@dataclass(frozen=True)
class PairCorpus(TableCorpus):
    """A source of pairs."""

    def pairs(self, part: Part) -> Iterator[Pair]:
        if self.library is not None:
            for function in documented_functions(self.library.documents(part), **self.function_limit):
                yield Pair(function.id, function.docstring.split("\n\n")[0], function.answer)
            return
        held = held_ids(
            list(dict.fromkeys(pair.query for pair in self._rows)),
            fraction=self.selection.validation,
            seed=self.selection.seed,
        )
        yield from (pair for pair in self._rows if (pair.query in held) == (part == "validation"))

    @cached_property
    def _rows(self) -> list[Pair]:
        found = []
        for row in self.source.rows():
            names = next((names for names in FIELDS if names[0] in row.fields), None)
            texts = () if names is None else tuple(row.fields.get(name) for name in names)
            if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
                known = ", ".join(f"{a} and {b}" for a, b in FIELDS)
                raise BaguError(f"{row.place} is not a pair of texts", hint=f"its fields are {known}")
            found.append(Pair(row.id, *map(str, texts)))
        return found

    def training_texts(self) -> Iterator[str]:
        yield from (f"{pair.query}\n{pair.passage}" for pair in self.pairs("train"))


def pair_store(corpus: PairCorpus, part: Part, tokenizer: BpeTokenizer, context: int, cache: Path) -> TokenStore:
    """The tokens of a part, from the cache if they are there. A text is cut at `context` tokens."""

    def documents() -> Iterator[TokenDocument]:
        for pair in corpus.pairs(part):
            for sign, text in (("+", pair.query), ("-", pair.passage)):
                ids = tokenizer.encode(text)[:context]
                ids = ids if len(ids) > 1 else [*ids, *[tokenizer.eos_id] * (2 - len(ids))]
                yield TokenDocument(id=pair.id + sign, tokens=ids, mask=[0] + [1] * (len(ids) - 1))

    source = {**corpus.facts, "part": part, "pairs": 2, "context": context, "max_bytes": corpus.config.max_bytes}
    facts = {"source": source, **tokenizer.token_facts}
    return on_disk(documents(), cache, token_bytes=tokenizer.token_bytes, facts=facts)
