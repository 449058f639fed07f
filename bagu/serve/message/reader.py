"""Incremental reading: a parser is a generator that reads characters and yields when it needs more text.

A parser decides by the characters alone, so its result does not depend on how the text was cut into pieces.
"""

import re
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields when it needs more text; returns T


class Malformed(Exception):
    """The text does not have the expected form."""


class Reader:
    """The text that has arrived and is not read yet."""

    def __init__(self) -> None:
        self.unread = ""
        self.ended = False  # no more text will arrive
        self._recorders: list[list[str]] = []

    def feed(self, text: str) -> None:
        self.unread += text

    def record(self) -> list[str]:
        """A list to which all text is appended that is read from now on, until `stop`."""
        found: list[str] = []
        self._recorders.append(found)
        return found

    def stop(self, recorder: list[str]) -> None:
        self._recorders = [r for r in self._recorders if r is not recorder]

    def take(self, count: int) -> str:
        """Read `count` characters, which must have arrived."""
        text, self.unread = self.unread[:count], self.unread[count:]
        for recorder in self._recorders:
            recorder.append(text)
        return text

    def peek(self) -> Steps[str]:
        """The next character, without reading it; empty at the end of the text."""
        while not self.unread and not self.ended:
            yield
        return self.unread[:1]

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read characters as long as `pattern`, a character class with `*`, matches them."""
        parts = []
        while (yield from self.peek()):
            found = pattern.match(self.unread)
            assert found is not None, "the pattern matches the empty string"
            parts.append(self.take(found.end()))
            if self.unread:
                break
        return "".join(parts)

    def literal(self, *words: str) -> Steps[str | None]:
        """Read the one of `words` that comes next; read nothing and return None if it is none of them."""
        while True:
            for word in words:
                if self.unread.startswith(word):
                    return self.take(len(word))
            if self.ended or not any(word.startswith(self.unread) for word in words):
                return None
            yield

    def expect(self, *words: str) -> Steps[str]:
        """`literal`, which raises `Malformed` if none of the words comes next."""
        found = yield from self.literal(*words)
        if found is None:
            raise Malformed
        return found

    def find(self, words: Sequence[str]) -> tuple[int, bool]:
        """(characters before the first of `words`, True), or (characters that are certainly before any, False)."""
        places = [at for word in words if (at := self.unread.find(word)) >= 0]
        if places:
            return min(places), True
        if self.ended or not any(word[0] in self.unread for word in words):
            return len(self.unread), False
        longest = max(map(len, words))
        for size in range(min(longest - 1, len(self.unread)), 0, -1):
            tail = self.unread[len(self.unread) - size :]
            if any(word.startswith(tail) for word in words):
                return len(self.unread) - size, False
        return len(self.unread), False
