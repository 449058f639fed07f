"""Which server has which part of the flat parameters.

The flat order is cut into blocks. The key of a block is its number times an odd constant, modulo 2³²: multiplication by
the golden ratio spreads neighbours evenly over the ring of keys. With S servers, range r is the keys from r 2³² / S to
(r + 1) 2³² / S. Server r owns it, and servers r - 1 and r - 2 (cyclic) have copies: a server has its own range and
copies of the next two. A range is stored and sent as one contiguous array, its blocks in flat order.

Li et al. 2014, https://www.usenix.org/system/files/conference/osdi14/osdi14-paper-li_mu.pdf, section 4.3
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bagu.errors import ArgumentError

COPIES = 2  # besides the owner
BLOCK = 16384  # elements: 64 KiB of fp32
ALIGN = 64  # blocks of a small model are smaller, so that every server has some
SPREAD = 2654435769  # 2³² / golden ratio, odd


@dataclass(frozen=True, kw_only=True)
class Span:
    """Flat positions [start, stop) of one segment (parameters that have the same update rule)."""

    start: int
    stop: int
    segment: int


@dataclass(frozen=True, kw_only=True)
class Range:
    """The part of the flat order that a server owns: `spans` in flat order, one after the other in its array."""

    number: int
    spans: tuple[Span, ...]

    @cached_property
    def size(self) -> int:
        return sum(span.stop - span.start for span in self.spans)

    @cached_property
    def pieces(self) -> tuple[Span, ...]:
        """The positions of each segment in the range's array."""
        pieces, at = list[Span](), 0
        for span in self.spans:
            stop = at + span.stop - span.start
            if pieces and pieces[-1].segment == span.segment:
                pieces[-1] = Span(start=pieces[-1].start, stop=stop, segment=span.segment)
            else:
                pieces.append(Span(start=at, stop=stop, segment=span.segment))
            at = stop
        return tuple(pieces)

    def take(self, flat: np.ndarray) -> np.ndarray:
        """This range of a flat array, as a new contiguous array."""
        parts = [flat[span.start : span.stop] for span in self.spans]
        return np.concatenate(parts) if parts else flat[:0].copy()

    def put(self, flat: np.ndarray, values: np.ndarray) -> None:
        """Write the range's array into a flat one."""
        at = 0
        for span in self.spans:
            size = span.stop - span.start
            flat[span.start : span.stop] = values[at : at + size]
            at += size


def ranges_of(segments: Sequence[tuple[int, int]], servers: int) -> tuple[Range, ...]:
    """The ranges of `servers` servers over the segments [start, stop) of a flat array."""
    if servers < 1:
        raise ArgumentError(f"{servers} servers are asked for", hint="give 1 or more; 3 or more survive two deaths")
    total = sum(stop - start for start, stop in segments)
    block = max(ALIGN, min(BLOCK, total // (8 * servers) // ALIGN * ALIGN))
    spans: list[list[Span]] = [[] for _ in range(servers)]
    key = 0
    for number, (first, last) in enumerate(segments):
        for start in range(first, last, block):
            mine, stop = spans[key * servers >> 32], min(start + block, last)
            if mine and mine[-1].stop == start and mine[-1].segment == number:
                start = mine.pop().start
            mine.append(Span(start=start, stop=stop, segment=number))
            key = (key + SPREAD) % 2**32
    return tuple(Range(number=number, spans=tuple(found)) for number, found in enumerate(spans))


def holders(number: int, servers: int) -> tuple[int, ...]:
    """The servers that have range `number`: its owner, then those with copies."""
    return tuple((number - k) % servers for k in range(min(COPIES + 1, servers)))


def digest(ranges: Sequence[Range]) -> str:
    """A name of the layout. Messages carry it instead of the list of keys."""
    text = ";".join(
        f"{s.start}:{s.stop}:{s.segment}" for r in ranges for s in (*r.spans, Span(start=0, stop=0, segment=0))
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]
