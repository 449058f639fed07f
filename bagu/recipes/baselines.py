"""Baselines of the demo: the size of the held-out text with stock compressors.

A model's bits per byte is the size of the held-out text under an arithmetic coder with the model's probabilities, so it
is comparable with gzip and xz. xz primed with the training text is the fairest comparison of the three: it has also
seen the training files, so any gain of the model over it is not copying.
"""

import gzip
import lzma
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Compressors:
    """Bits per byte of the held-out text, with its files concatenated."""

    gzip_bits_per_byte: float
    xz_bits_per_byte: float
    primed_xz_bits_per_byte: float
    held_out_bytes: int
    priming_bytes: int


def compressors(training: Iterable[str], held_out: Iterable[str]) -> Compressors:
    """gzip -9 and xz -6 on the held-out text, and the size it adds to xz -6 of the training text.

    The dictionary of the primed xz covers the whole text (preset 6 alone looks back 8 MiB).
    """
    train, held = ("\n".join(texts).encode() for texts in (training, held_out))
    if not held:
        raise ValueError("there is no held-out text")
    span = max(2**20, 1 << (len(train) + len(held)).bit_length())
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": min(span, 2**30)}]
    xz = lambda data: len(lzma.compress(data, filters=filters))  # noqa: E731
    bits = lambda size: 8 * size / len(held)  # noqa: E731
    return Compressors(
        gzip_bits_per_byte=bits(len(gzip.compress(held, 9))),
        xz_bits_per_byte=bits(xz(held)),
        primed_xz_bits_per_byte=bits(xz(train + held) - xz(train)),
        held_out_bytes=len(held),
        priming_bytes=len(train),
    )
