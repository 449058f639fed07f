"""One source of a run as preferences: rows of a table, or functions of the standard library against broken ones.

A store (store.py) holds their tokens: the chosen answer with its prompt is a document whose id ends with "+", the
rejected one follows and ends with "-". The mask is 1 for the answer, which ends with the token that ends a turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bagu.data.broken_code import broken
from bagu.data.chat import ChatEncoder
from bagu.data.corpus import Part, TextCorpus
from bagu.data.preference_rows import Message, Preference, preference, same_prompt
from bagu.data.split import held_ids
from bagu.data.stdlib import documented_functions
from bagu.data.store import TokenDocument, TokenStore
from bagu.data.store_writer import on_disk
from bagu.data.table import TableSource
from bagu.data.table_corpus import TableCorpus
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError

BREAKAGE = 1  # the version of broken_code.py, which decides the rejected sides
NEIGHBOURS = 4  # functions before this one in its file whose bodies it may get


@dataclass(frozen=True)
class PreferenceCorpus(TableCorpus):
    """A source of preferences."""

    @cached_property
    def source(self) -> TableSource:
        if self.config.field is not None:
            raise BaguError("field is set, and preferences have fields of their own", hint="leave it out")
        return super().source

    def preferences(self, part: Part) -> Iterator[Preference]:
        """The preferences of a part. Nothing is read before the first one is asked for."""
        if self.library is not None:
            yield from self._functions(self.library, part)
            return
        for found in self._rows:
            if (found.id in self._held_out) == (part == "validation"):
                yield found

    @cached_property
    def _rows(self) -> list[Preference]:
        return [preference(row) for row in self.source.rows()]

    @cached_property
    def _held_out(self) -> frozenset[str]:
        """Rows are held out by their prompt, so that no answer to a training prompt is in the validation."""
        first = same_prompt(self._rows)
        if len(set(first.values())) == 1:  # one prompt for all: hold out rows
            first = {id: id for id in first}
        prompts = list(dict.fromkeys(first.values()))
        held = held_ids(prompts, fraction=self.selection.validation, seed=self.selection.seed)
        return frozenset(id for id, prompt in first.items() if prompt in held)

    def _functions(self, library: TextCorpus, part: Part) -> Iterator[Preference]:
        """The real function over a broken one, for the functions of the files of a part."""
        before: list[str] = []
        file = None
        for function in documented_functions(library.documents(part), **self.function_limit):
            if function.file != file:
                before, file = [], function.file
            worse = broken(function.answer, others=before[-NEIGHBOURS:], seed=self.selection.seed)
            before.append(function.answer)
            if worse is None:
                continue
            yield Preference(
                id=function.id,
                place=f"{function.file}:{function.line}",
                prompt=({"role": "user", "content": function.question},),
                chosen={"role": "assistant", "content": function.answer},
                rejected={"role": "assistant", "content": worse.code},
                strings=True,
            )

    def training_texts(self) -> Iterator[str]:
        for found in self.preferences("train"):
            answers = [m for m in (found.chosen, found.rejected) if m is not None]
            yield "\n".join(str(message["content"]) for message in (*found.prompt, *answers))


class PreferenceEncoder:
    """Encodes a prompt and an answer as a chat. With `text` both are plain text: the answer follows the prompt
    directly and ends with the end-of-text token."""

    def __init__(self, tokenizer: BpeTokenizer, *, text: bool = False) -> None:
        self.tokenizer, self.text = tokenizer, text
        self.chat = None if text else ChatEncoder(tokenizer)

    @property
    def token_facts(self) -> dict[str, Any]:
        """What decides the tokens of a preference."""
        return (self.chat or self.tokenizer).token_facts

    def documents(self, found: Preference) -> Iterator[TokenDocument]:
        """The chosen and the rejected answer, each with the prompt before it."""
        documents = []
        for sign, answer in (("+", found.chosen), ("-", found.rejected)):
            if answer is not None:
                ids, start = self._encoded(found, answer)
                mask = [0] * start + [1] * (len(ids) - start)
                documents.append(TokenDocument(id=found.id + sign, tokens=ids, mask=mask))
        prompts = {tuple(d.tokens[: list(d.mask or ()).index(1)]) for d in documents}
        if len(prompts) > 1:
            raise BaguError(
                f"{found.place}: the chat template writes another prompt for each answer",
                hint="use a template that does not change earlier messages",
            )
        yield from documents

    def _encoded(self, found: Preference, answer: Message) -> tuple[list[int], int]:
        """Prompt and answer, and where the answer starts."""
        if self.chat is None:
            if not found.strings:
                raise BaguError(
                    f"{found.place}: objective.text is set, and this row has messages",
                    hint="leave objective.text out, or give strings",
                )
            prompt = self.tokenizer.encode_prompt(str(found.prompt[0]["content"]))
            return [*prompt, *self.tokenizer.encode(str(answer["content"])), self.tokenizer.eos_id], len(prompt)
        try:
            chat = self.chat.encode((*found.prompt, answer))
        except BaguError as error:
            error.args = (f"{found.place}: {error}",)
            raise
        end = len(chat.mask) - chat.mask[::-1].index(1)  # a template may add white space after the turn
        start = end - [*chat.mask[:end][::-1], 0].index(0)
        if start == 0:
            raise BaguError(f"{found.place}: the chat template writes no prompt before the answer", hint="correct it")
        return chat.ids[:end], start


def preference_store(corpus: PreferenceCorpus, part: Part, encoder: PreferenceEncoder, cache: Path) -> TokenStore:
    """The tokens of a part, from the cache if they are there."""
    source = {**corpus.facts, "part": part, "preferences": BREAKAGE, "max_bytes": corpus.config.max_bytes}
    documents = (document for found in corpus.preferences(part) for document in encoder.documents(found))
    return on_disk(
        documents, cache, token_bytes=encoder.tokenizer.token_bytes, facts={"source": source, **encoder.token_facts}
    )
