"""Chats that are longer than the context: cut at turns, so that every answer keeps its question.

A turn is a user's message and what follows until the next one. A piece has the system messages of the chat and as many
turns as fit, from the last turn backwards. A turn that does not fit by itself is left out: an answer without its
question, or a question without its answer, teaches something else.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any

from bagu.data.source import Conversation


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedChat:
    """Token ids, and a mask with 1 for the tokens of the assistant."""

    ids: list[int]
    mask: list[int]


Encode = Callable[[Sequence[Mapping[str, Any]], int], list[EncodedChat]]  # of messages, the first n of them given


def fitted(conversation: Conversation, encode: Encode, context: int) -> list[EncodedChat]:
    """The examples of a chat, each of at most `context` tokens; none if no turn fits."""
    messages, given = conversation.messages, conversation.given
    head = next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), len(messages))
    asks = [m.get("role") == "user" for m in messages]
    starts = [head, *(i for i in range(head + 1, len(messages)) if asks[i] and not asks[i - 1]), len(messages)]
    turns = list(pairwise(starts))

    @cache
    def made(first: int, stop: int) -> list[EncodedChat]:
        start, end = turns[first][0], turns[stop - 1][1]
        known = min(max(given, start), end)
        if not any(m.get("role") == "assistant" for m in messages[known:end]):
            return []
        return encode((*messages[:head], *messages[start:end]), head + known - start)

    def fits(stop: int, first: int) -> bool:
        return all(len(example.ids) <= context for example in made(first, stop))

    if fits(len(turns), 0):
        return made(0, len(turns))
    pieces: list[list[EncodedChat]] = []
    stop = len(turns)
    while stop:
        first = bisect_left(range(stop), True, key=partial(fits, stop))
        if first < stop:
            pieces.append(made(first, stop))
        stop = min(first, stop - 1)
    return [example for piece in reversed(pieces) for example in piece]
