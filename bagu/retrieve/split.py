"""Cut a text into passages at its structure, keeping exact character offsets: text[start:end] is the passage.

A span that is over the budget is cut at the strongest boundary inside it (headings or definitions, then paragraphs,
lines, sentences, words), and neighbours are joined again while they fit. Sizes are in estimated tokens, a quarter of
the other characters plus each Chinese, Japanese or Korean one: an index has no tokenizer.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from bagu.errors import ArgumentError

PARAGRAPHS = (re.compile(r"\n[ \t]*\r?\n\s*"), re.compile(r"\n"))
SENTENCES = (re.compile(r"(?<=[.!?;])\s+|(?<=[。！？；])"), re.compile(r"\s+"))
# each boundary is the end of a match. A pattern that begins with \n is searched for 5 times faster than one with ^
MARKS = {
    "markdown": (re.compile(r"\n(?=#{1,2} )"), re.compile(r"\n(?=#{3,6} )")),
    "python": (re.compile(r"\n(?=@|def |class |async def )"), re.compile(r"\n(?=    (?:@|def |async def ))")),
    "text": (),
}
TITLES = {
    "markdown": re.compile(r"\n#{1,6} +(.+?)\s*#*\s*$", re.M),
    "python": re.compile(r"\n {0,4}(?:async )?(?:def|class) +(\w+)"),
}


@dataclass(frozen=True, kw_only=True)
class Chunking:
    """How long a passage is, in estimated tokens, and how much of it the next one repeats."""

    size: int = 256
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.size < 16:
            raise ArgumentError(f"passages of {self.size} tokens", hint="16 or more")
        if not 0 <= self.overlap <= self.size // 2:
            raise ArgumentError(f"an overlap of {self.overlap} tokens", hint=f"0 to {self.size // 2}, half of the size")


@dataclass(frozen=True, slots=True)
class Span:
    """A passage before it is stored: offsets in characters, the first line (from 1), the heading that it is under."""

    start: int
    end: int
    line: int
    title: str


def split(text: str, kind: str = "text", chunking: Chunking | None = None) -> list[Span]:
    """The passages of a text; spaces around them are left out, and so are passages without any character."""
    chunking = chunking or Chunking()
    boundaries = (*MARKS.get(kind, ()), *PARAGRAPHS, *SENTENCES)
    titles = [(m.start(), m[1]) for m in TITLES[kind].finditer(f"\n{text}")] if kind in TITLES else []
    found: list[Span] = []
    line, counted, at, title = 1, 0, 0, ""
    for start, end in _overlapping(
        text, list(_pieces(text, 0, len(text), boundaries, chunking.size, _weights(text))), chunking.overlap
    ):
        piece = text[start:end]
        start, end = start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())
        if start >= end:
            continue
        line += text.count("\n", counted, start) if start >= counted else -text.count("\n", start, counted)
        counted = start
        while at < len(titles) and titles[at][0] <= start:
            title = titles[at][1]
            at += 1
        found.append(Span(start, end, line, title))
    return found


def tokens(text: str) -> int:
    """An estimate of the number of tokens."""
    return _eighths(text) // 8


def _eighths(text: str) -> int:
    """The estimate in eighths of a token, which add up: a quarter token for a character, a whole one for one of three
    bytes in UTF-8."""
    more = 0 if text.isascii() else len(text.encode(errors="surrogatepass")) - len(text)
    return 2 * len(text) + 3 * more


def _weights(text: str) -> Callable[[int, int], int]:
    """`_eighths` of text[a:b] by a and b; in ASCII it is arithmetic."""
    return (lambda a, b: 2 * (b - a)) if text.isascii() else lambda a, b: _eighths(text[a:b])


def _pieces(
    text: str,
    start: int,
    end: int,
    boundaries: tuple[re.Pattern[str], ...],
    size: int,
    weight_of: Callable[[int, int], int],
) -> Iterator[tuple[int, int]]:
    if weight_of(start, end) // 8 <= size:
        yield start, end
        return
    if not boundaries:  # a long run without any boundary, such as base64: cut by length
        step = size if not text[start:end].isascii() else 4 * size
        yield from ((at, min(at + step, end)) for at in range(start, end, step))
        return
    cuts = [start, *[at for m in boundaries[0].finditer(text, start, end) if start < (at := m.end()) < end], end]
    begin, weight = start, 0
    for a, b in pairwise(cuts):  # join neighbours while they fit; what is too long alone is cut at the next boundary
        more = weight_of(a, b)
        if begin < a and (weight + more) // 8 > size:
            yield begin, a
            begin, weight = a, 0
        if more // 8 > size:
            yield from _pieces(text, a, b, boundaries[1:], size, weight_of)
            begin = b
        else:
            weight += more
    if begin < end:
        yield begin, end


def _overlapping(text: str, pieces: list[tuple[int, int]], overlap: int) -> Iterator[tuple[int, int]]:
    """The pieces, each beginning `overlap` tokens earlier, at a space."""
    for number, (start, end) in enumerate(pieces):
        if overlap and number:
            back = overlap * (4 if text[max(0, start - 4 * overlap) : start].isascii() else 1)
            earlier = max(pieces[number - 1][0], start - back)
            space = re.compile(r"\s").search(text, earlier, start)
            start = space.end() if space else earlier
        yield start, end
