"""The bodies of `/v1/score` (vLLM's) and `/v1/rerank` (Jina's and vLLM's): pairs of texts to compare.

An encoder compares the embeddings of two texts by their cosine. A reward model reads both in one sequence: the first as
the user's message and the second as the answer.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from bagu.errors import BaguError
from bagu.serve.http.bodies import fields
from bagu.serve.http.bodies.openai import MAX_PROMPTS, Body, ModelName, Word
from bagu.serve.http.bodies.texts import check_length, encode, tokens_left
from bagu.serve.http.errors import ApiError
from bagu.serve.wire.messages import Ready

Pair = tuple[str, str]
Words = Annotated[
    Word | Annotated[list[Word], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)],
    Field(description=f"a non-empty text, or a list of up to {MAX_PROMPTS} of them"),
]


class ScoreBody(Body):
    param: ClassVar[str] = "text_2"  # named by errors about a pair
    unsupported: ClassVar[fields.Fields] = fields.SCORE
    model: ModelName | None = None
    text_1: Words
    text_2: Words

    def pairs(self) -> list[Pair]:
        """One pair per score: one text with each of the others, or the texts of equal numbers."""
        self.refuse_unsupported()
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            hint = "send one text_1, or as many as text_2"
            raise ApiError(400, f"{len(first)} texts in text_1 and {len(second)} in text_2", param="text_1", hint=hint)
        return list(zip(first, second, strict=True))


class DocumentField(Body):
    text: Word


class RerankBody(Body):
    param: ClassVar[str] = "documents"
    unsupported: ClassVar[fields.Fields] = fields.SCORE
    model: ModelName | None = None
    query: Word
    documents: Annotated[
        list[Word | DocumentField],
        Field(
            fail_fast=True,
            min_length=1,
            max_length=MAX_PROMPTS,
            description=f'a list of up to {MAX_PROMPTS} non-empty texts, or of objects with a "text"',
        ),
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None  # None or 0: all documents
    return_documents: bool | None = None  # None: yes

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]

    def pairs(self) -> list[Pair]:
        self.refuse_unsupported()
        return [(self.query, text) for text in self.texts]


def check_scores(ready: Ready) -> None:
    if ready.generates:
        raise ApiError(400, "this model generates text and has no scores", hint="use an encoder or a reward model")


def embedded_texts(pairs: list[Pair], ready: Ready, param: str) -> dict[str, list[int]]:
    """The tokens of every text of the pairs; a text in several pairs is embedded once."""
    texts = {text: encode(text, ready, param) for text in dict.fromkeys(text for pair in pairs for text in pair)}
    _check(list(texts.values()), ready, param)
    return texts


def scored_texts(pairs: list[Pair], ready: Ready, param: str) -> list[list[int]]:
    """The tokens of each pair as a question and its answer, as in the training of a reward model."""
    found = [_answer(ready, question, answer, param) for question, answer in pairs]
    _check(found, ready, param)
    return found


def _answer(ready: Ready, question: str, answer: str, param: str) -> list[int]:
    check_length(f"{question}\n{answer}", ready, param)
    if ready.chat is None:
        return [*encode(question, ready, param), *ready.tokenizer.encode(answer), ready.tokenizer.eos_id]
    try:
        chat = ready.chat.encode([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    except BaguError as error:
        raise ApiError(400, str(error), param=param, hint=error.hint) from error
    return chat.ids[: len(chat.mask) - chat.mask[::-1].index(1)]  # without white space after the turn


def _check(texts: list[list[int]], ready: Ready, param: str) -> None:
    if not all(texts):
        raise ApiError(400, "a text has no tokens", param=param, hint="send at least one token")
    tokens_left(texts, 0, ready.max_model_len, param)
