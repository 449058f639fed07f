"""Checks whether a training set contains items of a task, by shared runs of words.

An item counts as contaminated if at least the fraction `SHARE` of its 13-word runs is in the training text (13 words as
in GPT-3's report, https://arxiv.org/abs/2005.14165, C). Words are runs of letters and digits, in lower case, so white
space and punctuation do not hide a copy; in a script without spaces between words each character is one. Items of fewer
than 13 words are too short to tell: "2 + 2 = 4" is in any large text. They are counted and never found.
"""

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from bagu.eval.task import Item

WORDS, SHARE = 13, 0.5
# Thai, Lao, Tibetan, Burmese, Khmer, kana, Han: with their vowel signs, which \w does not match
UNSPACED = (
    "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)


@dataclass(frozen=True, kw_only=True)
class Contamination:
    """The ids of the items that the training text contains. `short` items have too few words to tell."""

    items: int
    short: int
    found: tuple[str, ...]

    @property
    def share(self) -> float:
        return len(self.found) / self.items


def check_contamination(items: Sequence[Item], training: Iterable[str]) -> Contamination:
    """Compare the text of each item, question and right answer, with all training texts."""
    texts = {item.id: _words(_text(item)) for item in items}
    wanted = {id: list(_runs(words)) for id, words in texts.items() if len(words) >= WORDS}
    asked = {run for runs in wanted.values() for run in runs}
    seen: set[int] = set()
    for text in training:
        seen.update(run for run in _runs(_words(text)) if run in asked)
    found = [id for id, runs in wanted.items() if sum(run in seen for run in runs) >= SHARE * len(runs)]
    return Contamination(items=len(items), short=len(items) - len(wanted), found=tuple(found))


def _text(item: Item) -> str:
    answer = item.choices[item.answer] if item.choices and isinstance(item.answer, int) else str(item.answer or "")
    asked = item.prompt or " ".join(m["content"] for m in item.messages)
    return f"{asked} {answer}"


def _words(text: str) -> list[str]:
    return re.findall(rf"[{UNSPACED}]|[^\W{UNSPACED}]+", text.lower())


def _runs(words: list[str]) -> Iterator[int]:
    """Each run of WORDS words as a 64-bit hash: a false match among 10^9 runs has a probability of 10^-10."""
    hashes = array("Q", (int.from_bytes(blake2b(word.encode(), digest_size=8).digest()) for word in words))
    for i in range(len(words) - WORDS + 1):
        yield hash(hashes[i : i + WORDS].tobytes())
