"""Honest yardsticks: what stock compressors need for the held-out text, and what samples of code are worth.

A model's bits per byte is the size its held-out text would have if the model's probabilities drove an arithmetic coder,
so it stands beside gzip and xz. xz primed with the training text is the fair one of the three: it too has seen the
training files, and whatever the model gains over it is not copying.
"""

from __future__ import annotations

import ast
import gzip
import lzma
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["CodeSamples", "Compressors", "compressors", "judge_code"]


@dataclass(frozen=True, kw_only=True)
class Compressors:
    """Bits per byte of the held-out text, its files laid end to end."""

    gzip_bits_per_byte: float
    xz_bits_per_byte: float
    primed_xz_bits_per_byte: float
    held_out_bytes: int
    priming_bytes: int


def compressors(training: Iterable[str], held_out: Iterable[str]) -> Compressors:
    """gzip -9 and xz -6 on the held-out text, and what it adds to xz -6 of the training text.

    The dictionary of the primed xz spans all of the text (preset 6 alone looks back 8 MiB).
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


@dataclass(frozen=True, kw_only=True)
class CodeSamples:
    """What a set of samples is worth as Python. A share of parses says little without the two beside it: the empty
    text parses, and so does one line said a hundred times."""

    count: int
    parse_percent: float
    define_percent: float  # parses and defines a function
    mean_characters: float
    distinct_4gram_percent: float  # of the 4-grams of words over all samples, those that occur once are new


def judge_code(samples: Sequence[str]) -> CodeSamples:
    """How many parse (an empty sample does not count), how many define a function, how long, how varied."""
    trees = [_parse(text) for text in samples]
    grams = [gram for text in samples for gram in zip(*(text.split()[i:] for i in range(4)), strict=False)]
    share = lambda hits, of: 100 * hits / of if of else 0.0  # noqa: E731
    return CodeSamples(
        count=len(samples),
        parse_percent=share(sum(t is not None for t in trees), len(samples)),
        define_percent=share(sum(t is not None and _defines(t) for t in trees), len(samples)),
        mean_characters=sum(map(len, samples)) / len(samples) if samples else 0.0,
        distinct_4gram_percent=share(len(set(grams)), len(grams)),
    )


def _parse(text: str) -> ast.Module | None:
    """The tree of a sample that is Python and says something, else None."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" in a sample is the sample's business
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what ast.parse raises on text that is no Python
        return None
    return tree if tree.body else None


def _defines(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in tree.body)
