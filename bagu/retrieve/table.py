"""An embedder that is a table of term vectors: a text's vector is the weighted sum of those of its terms.

It needs numpy alone, 10,000 passages a second, so it also runs in the HTTP process. `recipes/token_table.py` trains it.
A term that comes n times counts n / (n + 1); what the training learned of its weight is in the length of its vector.
Queries have vectors of their own: the words of a question mean other things than those of code.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from bagu.errors import BaguError
from bagu.retrieve.words import terms

FILE = "table.npz"
FLOOR = 0.25  # a passage with a smaller cosine is not offered; chosen, not calibrated


def is_table(path: Path) -> bool:
    return (path / FILE).is_file()


def packed(texts: Sequence[str], codes: dict[str, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The known terms of the texts, one after the other: (codes, weights, where each text begins)."""
    ids: list[int] = []
    counts: list[int] = []
    starts = [0]
    for text in texts:
        known = Counter(codes[term] for term in terms(text) if term in codes)
        ids += known
        counts += known.values()
        starts.append(len(ids))
    times = np.array(counts, dtype=np.float32)
    return np.array(ids, dtype=np.int64), times / (times + 1), np.array(starts[:-1], dtype=np.int64)


class TableEmbedder:
    """A table in a folder; `Embedder` for an index."""

    floor = FLOOR

    def __init__(self, name: str) -> None:
        self.name = str(Path(name).resolve())
        try:
            with np.load(Path(name, FILE), allow_pickle=False) as found:
                words, self.passages, self.queries = found["terms"], found["passages"], found["queries"]
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise BaguError(f"{Path(name, FILE)} is not a table of vectors: {error}", hint="train it again") from error
        self.codes = {term: i for i, term in enumerate(json.loads(words.tobytes()))}
        self.size = int(self.passages.shape[1])

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.passages.tobytes() + self.queries.tobytes()).hexdigest()

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        return self._sums(texts, self.passages)

    def embed_query(self, text: str) -> np.ndarray:
        return self._sums([text], self.queries)[0]

    def _sums(self, texts: Sequence[str], table: np.ndarray) -> np.ndarray:
        ids, weights, starts = packed(texts, self.codes)
        found = np.zeros((len(texts), self.size), dtype=np.float32)
        for row, (a, b) in enumerate(pairwise([*starts.tolist(), len(ids)])):
            found[row] = weights[a:b] @ table[ids[a:b]].astype(np.float32)
        return found


def save(folder: Path, words: Sequence[str], passages: np.ndarray, queries: np.ndarray) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = np.frombuffer(json.dumps(list(words), ensure_ascii=False).encode(), dtype=np.uint8)
    np.savez(folder / FILE, terms=names, passages=passages.astype(np.float16), queries=queries.astype(np.float16))
