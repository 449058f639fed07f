"""Checks whether a training set contains items of a task, by shared runs of words.

An item counts as contaminated if at least the fraction `SHARE` of its 13-word runs is in the training text (13 words as
in GPT-3's report, https://arxiv.org/abs/2005.14165, C). Words are runs of letters and digits, in lower case, so white
space and punctuation do not hide a copy. Items of fewer than 13 words are compared as a whole.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from bagu.eval.task import Item

WORDS, SHARE = 13, 0.5


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """The ids of the items that the training text contains."""

    items: int
    found: tuple[str, ...]

    @property
    def share(self) -> float:
        return len(self.found) / self.items


def check_contamination(items: Sequence[Item], training: Iterable[str]) -> Contamination:
    """Compare the text of each item, question and right answer, with all training texts."""
    texts = {item.id: _words(_text(item)) for item in items}
    lengths = {min(WORDS, len(words)) for words in texts.values() if words}
    wanted = {run for words in texts.values() if words for run in _runs(words, min(WORDS, len(words)))}
    seen: set[int] = set()
    for text in training:
        words = _words(text)
        for length in lengths:
            seen.update(run for run in _runs(words, length) if run in wanted)
    found = []
    for id, words in texts.items():
        runs = list(_runs(words, min(WORDS, len(words)))) if words else []
        if runs and sum(run in seen for run in runs) >= SHARE * len(runs):
            found.append(id)
    return Contamination(items=len(items), found=tuple(found))


def _text(item: Item) -> str:
    answer = item.choices[item.answer] if item.choices and isinstance(item.answer, int) else str(item.answer or "")
    asked = item.prompt or " ".join(m["content"] for m in item.messages)
    return f"{asked} {answer}"


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _runs(words: list[str], length: int) -> Iterator[int]:
    """Each run of `length` words as a 64-bit hash: a false match among 10^9 runs has a probability of 10^-10."""
    hashes = array("Q", (int.from_bytes(blake2b(word.encode(), digest_size=8).digest()) for word in words))
    for i in range(len(words) - length + 1):
        yield hash(hashes[i : i + length].tobytes())
