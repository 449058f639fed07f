"""The terms of a text, for the lexical index and for queries.

Words in lower case with English endings cut; an identifier also by its parts (`readFile_v2` -> readfile_v2, read, file,
v, 2). Chinese, Japanese and Korean have no spaces, so their runs become pairs of neighbouring characters: a word of two
characters is one term, and a query of it finds the passages that hold exactly these two side by side.
"""

import re
import unicodedata
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, pairwise

CJK = "\u3041-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
RUN = re.compile(rf"[{CJK}]+|[^\W{CJK}]+")  # a run of these characters, or a word of any other script
ASCII_RUNS = "".join(c if c.isalnum() or c == "_" else " " for c in map(chr, range(128)))  # the others become spaces
PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")
IS_CJK = re.compile(f"[{CJK}]")


def runs(text: str) -> list[str]:
    """The runs of characters that terms are made of, in the order of the text."""
    if text.isascii():
        return text.translate(ASCII_RUNS).split()  # 6 times faster than RUN
    return RUN.findall(unicodedata.normalize("NFKC", text))


def terms(text: str) -> Iterator[str]:
    """The terms in the order of the text; a term comes as often as it occurs."""
    return chain.from_iterable(map(word_terms, runs(text)))


@lru_cache(maxsize=1 << 18)  # a text repeats its words: 4 times faster, about 60 MB when full
def word_terms(word: str) -> tuple[str, ...]:
    """The terms of one run of characters."""
    if word.isascii():
        if word.islower() and word.isalpha():
            return (stem(word),)
        parts = PART.findall(word)
    elif IS_CJK.match(word):
        return tuple(map("".join, pairwise(word))) or (word,)
    else:
        parts = [part for part in word.split("_") if part]
    whole = word.strip("_").lower()
    if len(parts) < 2:
        return (stem(whole),) if whole else ()
    return (whole, *(stem(part.lower()) for part in parts))


@lru_cache(maxsize=1 << 16)  # identifiers share their parts
def stem(word: str) -> str:
    """An English word without its ending, by a few rules: writes, writing, write -> writ."""
    if not word.isascii() or len(word) < 4:
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith("s") and not word.endswith("ss"):
        word = word[:-1]
    for ending, shortest in (("ing", 6), ("ed", 5)):
        if word.endswith(ending) and len(word) >= shortest:
            word = word[: -len(ending)]
            word = word[:-1] if word[-1] == word[-2] and word[-1] not in "lsz" else word
            break
    return word.removesuffix("e") if len(word) > 3 else word
