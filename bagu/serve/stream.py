"""From tokens to text as it grows: whole characters only, and nothing that a stop string may still take back.

    token -> detokenizer.push -> text delta -> StopStrings.push -> text to send

A character may be spread over several tokens, and until its last byte is there its text waits. The sum of the deltas is
`tokenizer.decode` of all tokens. Only the output is decoded: a prompt that ends inside a character leaks none of its
text into the first delta.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bagu.serve.request import Sampling, TokenEvent
from bagu.types import Tokenizer

__all__ = ["ByteDetokenizer", "SpanDetokenizer", "StopStrings", "Stopped", "TextStream", "detokenizer"]

CUT = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for bytes that are no character, or not one yet


class ByteDetokenizer:
    """Text of a growing run of tokens, of a tokenizer whose text is the bytes of its tokens: 0.5 µs a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._rest = b""  # the beginning of a character

    def push(self, token: int) -> str:
        """The text that this token completes; empty while a character is cut."""
        data = self._rest + self._bytes_of(token)
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        """What is left at the end, as U+FFFD where it is no character."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class SpanDetokenizer:
    """The same for any tokenizer, by `decode` alone.

    It is asked for two spans, tokens[read:] with and without the settled run before it, so that decoders which look at
    the token before (SentencePiece's spaces) see it, and a push costs the tokens since the last whole character and not
    the history. A cut character decodes to U+FFFD, so text that ends with one waits for the next token. (SentencePiece
    takes a run of bytes back where one of them turns out to be no UTF-8; what was sent stays.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._tokens: list[int] = []  # from the last settled run on
        self._settled = 0  # of these, how many are already text

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True) if self._settled < len(self._tokens) else ""

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._settled]) if self._settled else ""
        text = self._decode(self._tokens)
        if not final and (text.endswith(CUT) or len(text) <= len(before)):
            return ""
        del self._tokens[: self._settled]
        self._settled = len(self._tokens)
        return text[len(before) :]


def detokenizer(tokenizer: Tokenizer) -> ByteDetokenizer | SpanDetokenizer:
    return ByteDetokenizer(tokenizer) if tokenizer.byte_level else SpanDetokenizer(tokenizer)


class Stopped(NamedTuple):
    """Text that may be sent, and the stop string that ends it, if one was found."""

    text: str
    stop: str | None


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces, and holds back what may be its beginning."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, delta: str, *, armed: bool = True) -> Stopped:
        """Text that is safe to send now. Unarmed (below min_tokens), text passes and no stop string can begin in it."""
        text = self._held + delta
        if not armed:
            self._held = ""
            return Stopped(text, None)
        found = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)  # the earliest; of those at one place, the longest
            self._held = ""
            return Stopped(text[: at + len(stop) if self._include else at], stop)
        keep = self._overlap(text)
        self._held = text[len(text) - keep :]
        return Stopped(text[: len(text) - keep], None)

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """The longest end of `text` that is the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class TextStream:
    """The text of one choice, from its events: the two above, and the rules of where it ends.

    The token that ends a choice (end of text, or one of `stop_token_ids`) has no text unless `include_stop`.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self._detokenizer = detokenizer(tokenizer)
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop) if sampling.stop else None
        self._sampling, self._count = sampling, 0
        self.stop: str | None = None  # the stop string that was found; nothing comes after it

    @property
    def each(self) -> Callable[[int], str]:
        """What `push` comes to for a token that is neither silent nor last, to be called for each of them."""
        return self._detokenizer.push if self._stops is None else self.push

    def push(self, token: int | None, *, last: bool = False, silent: bool = False) -> str:
        """Text to send now. `silent`: the token counts and has no text; `last`: nothing comes after it."""
        if self.stop is not None:
            return ""
        delta = "" if token is None or silent else self._detokenizer.push(token)
        if last:
            delta += self._detokenizer.flush()
        if self._stops is None:
            return delta
        self._count += token is not None
        text, self.stop = self._stops.push(delta, armed=self._count >= self._sampling.min_tokens)
        return text + self._stops.flush() if last and self.stop is None else text

    def read(self, event: TokenEvent, *, silent: bool = False) -> str:
        """The same for an event of the engine."""
        if event.finish is None:
            return self.push(event.token, silent=silent)
        ended_by_token = event.finish == "stop" and not isinstance(event.stop_reason, str)
        silent = silent or (ended_by_token and not self._sampling.include_stop)
        return self.push(event.token, last=True, silent=silent)
