"""Citations: the marks [1], [2] of an answer, and whether the passage that each names supports its sentence.

A mark is looked for outside of code, since `x[1]` is an index. What the sentence quotes, and its numbers and
identifiers, must occur in the passage; a sentence without any of these must share half of its words with it. A mark
whose number no passage has is reported, never given to another passage.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from bagu.retrieve.prompt import Shown
from bagu.retrieve.words import terms

CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.S)
MARK = re.compile(r"(?<![\w\])])\[(\d{1,4}(?:\s*,\s*\d{1,4})*)\]|(?<=\])\[(\d{1,4})\]")
ENDS = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])|\n+")
QUOTED = re.compile(r'"([^"\n]{2,})"|“([^”\n]{2,})”|「([^」\n]{2,})」|`([^`\n]{2,})`')
NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*")
IDENTIFIER = re.compile(r"\b[A-Za-z]+(?:_\w+)+\b|\b[a-z]+[A-Z]\w*\b|\b\w+(?:\.\w+)+\(\)")
SHARED = 0.5  # of a sentence's words that its passage must have, if there is nothing else to look up


@dataclass(frozen=True, kw_only=True, slots=True)
class Citation:
    """A mark at `start` to `end` of the answer. `why` says what is wrong with it; empty if it is verified."""

    start: int
    end: int
    number: int
    passage: Shown | None
    why: str = ""

    @property
    def verified(self) -> bool:
        return not self.why


def citations(answer: str, passages: Mapping[int, Shown]) -> list[Citation]:
    """The citations of an answer, in its order; `passages` by the numbers that the model was shown."""
    hidden = CODE.sub(lambda code: "`" * len(code[0]), answer)  # the same length, so that offsets stay
    found = []
    for mark in MARK.finditer(hidden):
        begin = max((end.end() for end in ENDS.finditer(hidden, 0, mark.start())), default=0)
        sentence = answer[begin : mark.start()]
        if not MARK.sub("", sentence).strip(" .,;"):  # a mark after the full stop belongs to the sentence before it
            ends = [0, *(end.end() for end in ENDS.finditer(hidden, 0, begin))]
            sentence = answer[ends[-2] if len(ends) > 1 else 0 : mark.start()]
        for number in map(int, re.findall(r"\d+", mark[0])):
            passage = passages.get(number)
            why = f"there is no passage {number}" if passage is None else unsupported(sentence, passage.text)
            found.append(Citation(start=mark.start(), end=mark.end(), number=number, passage=passage, why=why))
    return found


def unsupported(sentence: str, text: str) -> str:
    """What of a sentence a text does not say, in words; empty if it supports the sentence."""
    sentence, source = MARK.sub("", sentence), _folded(text)
    quotes = ["".join(filter(None, groups)) for groups in QUOTED.findall(sentence)]
    rest = QUOTED.sub(" ", sentence)
    wanted = [*quotes, *NUMBER.findall(rest), *IDENTIFIER.findall(rest)]
    for what in wanted:
        if not _occurs(_folded(what).rstrip("()"), source):
            return f"{what!r} is not in it"
    words = set(terms(rest))
    if not wanted and words and len(words & set(terms(text))) < SHARED * len(words):
        return "most of its words are not in it"
    return ""


def _occurs(what: str, source: str) -> bool:
    """Whether it occurs, a number not as a part of another one."""
    if not what[:1].isdigit():
        return what in source
    return re.search(rf"(?<![\w.]){re.escape(what)}(?![\w]|[.,]\d)", source) is not None


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())
