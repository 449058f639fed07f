"""Baselines of the demo: the size of the held-out text with stock compressors, and the quality of code samples.

A model's bits per byte is the size of the held-out text under an arithmetic coder with the model's probabilities, so it
is comparable with gzip and xz. xz primed with the training text is the fairest comparison of the three: it has also
seen the training files, so any gain of the model over it is not copying.
"""

import ast
import gzip
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bagu.data.stdlib import parsed
from bagu.eval.diversity import distinct_ngrams


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


@dataclass(frozen=True, kw_only=True)
class CodeSamples:
    """The quality of a set of samples as Python. The fraction that parses is not enough without the two others: the
    empty text parses, and so does one line repeated a hundred times.
    """

    count: int
    parse_percent: float
    define_percent: float  # parses and defines a function
    mean_characters: float
    distinct_4gram_percent: float  # distinct 4-grams of words as a percentage of all 4-grams of all samples


def judge_code(samples: Sequence[str]) -> CodeSamples:
    """How many samples parse (an empty sample does not), how many define a function, their length and variety."""
    trees = [_parse(text) for text in samples]
    share = lambda hits, of: 100 * hits / of if of else 0.0  # noqa: E731
    return CodeSamples(
        count=len(samples),
        parse_percent=share(sum(t is not None for t in trees), len(samples)),
        define_percent=share(sum(t is not None and _defines(t) for t in trees), len(samples)),
        mean_characters=sum(map(len, samples)) / len(samples) if samples else 0.0,
        distinct_4gram_percent=100 * distinct_ngrams(samples),
    )


def _parse(text: str) -> ast.Module | None:
    """The tree of a sample that is Python with at least one statement, else None."""
    tree = parsed(text)
    return tree if tree is not None and tree.body else None


def _defines(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in tree.body)
