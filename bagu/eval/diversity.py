"""How much the answers of a model differ from each other.

A policy that found one text that wins a reward repeats it: its score is high, and these shares are low.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from bagu.data.stdlib import parsed
from bagu.eval.grades import first_code


@dataclass(frozen=True, kw_only=True)
class Diversity:
    """Shares from 0 to 1. `bodies`: different function bodies, of the answers that define a function; `ngrams`:
    different 4-grams of words, of all 4-grams of all answers. Both fall with the number of answers: compare equal
    numbers."""

    bodies: float
    ngrams: float
    answers: int


def diversity(texts: Sequence[str]) -> Diversity:
    bodies = [body for text in texts if (body := _body(text)) is not None]
    return Diversity(
        bodies=len(set(bodies)) / len(bodies) if bodies else 0.0, ngrams=distinct_ngrams(texts), answers=len(texts)
    )


def distinct_ngrams(texts: Sequence[str], n: int = 4) -> float:
    """The share of different n-grams of words among all of them; 0 if there are none."""
    grams = [gram for text in texts for gram in zip(*(text.split()[i:] for i in range(n)), strict=False)]
    return len(set(grams)) / len(grams) if grams else 0.0


def _body(text: str) -> str | None:
    """The body of the first function, so that the same body under another name is equal; None if there is none."""
    tree = parsed(first_code(text))
    function = next((n for n in tree.body if isinstance(n, ast.FunctionDef)), None) if tree is not None else None
    if function is None:
        return None
    try:
        return "\n".join(map(ast.dump, function.body))
    except RecursionError:  # nested too deeply for `dump`
        return text
