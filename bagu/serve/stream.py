"""Incremental detokenization: text to send for each token, without incomplete characters and partial stop strings.

    token -> detokenizer.push -> text delta -> StopStrings.push -> text to send

A character may span several tokens; its text is held back until its last byte is there. The concatenated deltas equal
`tokenizer.decode` of all tokens. Only the output is decoded: if the prompt ends inside a character, no text of the
prompt appears in the first delta.
"""

from codecs import utf_8_decode
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bagu.serve.request import Sampling, TokenEvent
from bagu.types import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # decoders return it for invalid bytes and for an incomplete character


class ByteDetokenizer:
    """For byte-level tokenizers, whose text is the concatenated bytes of the tokens: 0.5 µs per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.bytes_of
        self._rest = b""  # the first bytes of an incomplete character

    def push(self, token: int) -> str:
        """The text completed by this token; empty while a character is incomplete."""
        data = self._rest + self._bytes_of(token)
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        """The remaining bytes at the end, as U+FFFD if they are not a whole character."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


class SpanDetokenizer:
    """For any tokenizer, with `decode` only.

    `decode` is called for the last emitted tokens alone and for those plus the new ones; the delta is the difference.
    So decoders that depend on the previous token (SentencePiece's spaces) see it, and the cost of a push does not grow
    with the history. An incomplete character decodes to U+FFFD, so text that ends with it is held back. (SentencePiece
    may change the text of earlier bytes if a later byte is not UTF-8; text that was already sent does not change.)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._tokens: list[int] = []  # the tokens of the last delta, then those not emitted yet
        self._emitted = 0  # how many of them are emitted

    def push(self, token: int) -> str:
        self._tokens.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        return self._advance(final=True) if self._emitted < len(self._tokens) else ""

    def _advance(self, *, final: bool) -> str:
        before = self._decode(self._tokens[: self._emitted]) if self._emitted else ""
        text = self._decode(self._tokens)
        if not final and (text.endswith(REPLACEMENT) or len(text) <= len(before)):
            return ""
        del self._tokens[: self._emitted]
        self._emitted = len(self._tokens)
        return text[len(before) :]


def detokenizer(tokenizer: Tokenizer) -> ByteDetokenizer | SpanDetokenizer:
    return ByteDetokenizer(tokenizer) if tokenizer.byte_level else SpanDetokenizer(tokenizer)


class Stopped(NamedTuple):
    """Text to send, and the stop string that ended it, or None."""

    text: str
    stop: str | None


class StopStrings:
    """Finds the first stop string in a text that arrives in deltas. Holds back text that may begin a stop string."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, delta: str, *, armed: bool = True) -> Stopped:
        """The text that can be sent now. If not `armed` (before min_tokens), no stop string can begin in the text."""
        text = self._held + delta
        if not armed:
            self._held = ""
            return Stopped(text, None)
        found = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)  # the first one; at the same position, the longest
            self._held = ""
            return Stopped(text[: at + len(stop) if self._include else at], stop)
        keep = self._overlap(text)
        self._held = text[len(text) - keep :]
        return Stopped(text[: len(text) - keep], None)

    def flush(self) -> str:
        """The held text, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[len(text) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0


class TextStream:
    """The text of one choice, from its events: detokenizer and stop strings.

    The token that ends a choice (end of text, or one of `stop_token_ids`) is not in the text unless `include_stop`.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling) -> None:
        self._detokenizer = detokenizer(tokenizer)
        self._stops = StopStrings(sampling.stop, include=sampling.include_stop) if sampling.stop else None
        self._sampling, self._count = sampling, 0
        self.stop: str | None = None  # the stop string that was found; no text follows it

    @property
    def push_token(self) -> Callable[[int], str]:
        """A function equal to `push` for a token that is neither silent nor last, without the overhead."""
        return self._detokenizer.push if self._stops is None else self.push

    def push(self, token: int | None, *, last: bool = False, silent: bool = False) -> str:
        """The text to send now. `silent`: the token counts but its text is left out; `last`: it is the last token."""
        if self.stop is not None:
            return ""
        delta = "" if token is None or silent else self._detokenizer.push(token)
        if last:
            delta += self._detokenizer.flush()
        if self._stops is None:
            return delta
        self._count += token is not None
        text, self.stop = self._stops.push(delta, armed=self._count >= self._sampling.min_tokens)
        # The engine searches for stop strings in a text with the names of silent tokens: none spans such a token.
        return text + self._stops.flush() if (last or silent) and self.stop is None else text

    def read(self, event: TokenEvent, *, silent: bool = False) -> str:
        """`push` for an event of the engine."""
        if event.finish is None:
            return self.push(event.token, silent=silent)
        ended_by_token = event.finish == "stop" and not isinstance(event.stop_reason, str)
        silent = silent or (ended_by_token and not self._sampling.include_stop)
        return self.push(event.token, last=True, silent=silent)
