"""Near-duplicate removal: MinHash signatures, LSH to find candidate pairs, exact Jaccard similarity to decide.

A document is the set of its 32-byte shingles (about five words; runs of white space count as one space), each hashed to
64 bits. Two documents are duplicates if the Jaccard similarity |A ∩ B| / |A ∪ B| of their sets reaches the threshold.

A digest of the text finds exact copies. For the rest, signatures are one-permutation MinHash (Li, Owen, Zhang 2012):
the hash range is split into K bins and the signature is the smallest hash of each bin, so a document is hashed once and
not K times. An empty bin takes the value of the first full bin in its own random order (Shrivastava 2017), which keeps
P(two bins agree) = Jaccard. Documents that agree in all four bins of any of 32 bands are compared: at similarity 0.8
this finds a pair with probability 1 - (1 - 0.8^4)^32 = 1 - 5e-8. Pairs are then compared exactly, so false candidates
cost time but remove no documents. The standard library with its tests (1,757 files, 31 MB) takes 5 s on one core.

The documents are read once for their hashes, and again where two are compared; 150 bytes of hashes per document stay in
memory, the signatures in a file. Of a pair with a document of more than `LONG` bytes, the shingles with the smallest
hashes are compared, a million or more: the standard deviation of the similarity is then 0.0005 at most.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from bagu.data.document import BLOCK, LONG, AnyDocument, scratch_file
from bagu.errors import BaguError

SHINGLE = 32  # bytes; a power of two
BANDS, ROWS = 32, 4
BIN_BITS = 7
BINS = 1 << BIN_BITS
MAX = 2**64 - 1
assert BANDS * ROWS == BINS


@dataclass(frozen=True, kw_only=True, slots=True)
class Duplicate:
    removed: str
    kept: str
    similarity: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DedupReport:
    documents: int
    threshold: float
    removed: tuple[Duplicate, ...]  # in the order of the documents
    removed_bytes: int


def deduplicate(
    documents: Sequence[AnyDocument], *, threshold: float = 0.8, seed: int = 0
) -> tuple[list[int], DedupReport]:
    """Leave out documents that are near-duplicates of an earlier, kept document; returns the numbers of those kept.

    Every removed document has a kept one with a similarity of at least `threshold`. Similarity is not transitive;
    comparing with kept documents only prevents removals through chains of similar documents.
    """
    if not 0.5 <= threshold <= 1.0:  # at 0.5 LSH finds 87 % of the pairs, and fewer below
        raise BaguError(f"the similarity threshold is {threshold}", hint="use 0.5 to 1; 0.8 is common")
    kept, removed, removed_bytes = [], [], 0
    search = Search(documents, threshold, seed) if len(documents) > 1 else None
    for number in range(len(documents)):
        found = None if search is None else search.near(number)
        if found is None:
            kept.append(number)
            continue
        document, other = documents[number], documents[found[1]]
        removed.append(Duplicate(removed=document.id, kept=other.id, similarity=found[0]))
        removed_bytes += document.num_bytes
    report = DedupReport(
        documents=len(documents), threshold=threshold, removed=tuple(removed), removed_bytes=removed_bytes
    )
    return kept, report


class Search:
    """Finds for each document in turn the earlier one, kept before, that it duplicates.

    Documents that share a band are lists linked through arrays: a dictionary of bands takes 9 KB per document.
    """

    def __init__(self, documents: Sequence[AnyDocument], threshold: float, seed: int) -> None:
        self.documents, self.threshold, self.shingler = documents, threshold, Shingler(seed)
        self.signatures = scratch_file()
        digests, keys = bytearray(), bytearray()
        for document in documents:
            digests += _digest(document)
            signature = self.shingler.signature(self.shingler.hashes(document.pieces(BLOCK)))
            self.signatures.write(signature.tobytes())
            keys += self.shingler.bands(signature).astype(np.uint32).tobytes()  # 32 bits: rarely a false candidate
        self.copies = np.unique(np.frombuffer(digests, "V16"), return_inverse=True)[1]
        self.first = np.full(len(documents), -1)  # the kept document of each group of copies
        bands = np.frombuffer(keys, np.uint32).reshape(-1, BANDS)
        self.groups = np.stack([_groups(bands[:, band]) for band in range(BANDS)], axis=1)
        self.rows = np.cumsum((self.groups >= 0).any(axis=1)) - 1  # only documents that share a band have a row below
        self.heads = np.full((BANDS, self.groups.max() + 1), -1, np.int32)  # the last kept document of each group
        self.links = np.full((self.rows[-1] + 1, BANDS), -1, np.int32)  # the one before it
        # A small cache is enough: documents of one similar group are compared with the same few documents.
        self.shingles_of = lru_cache(maxsize=64)(self._shingles)

    def near(self, number: int) -> tuple[float, int] | None:
        """The highest similarity and the earliest document that has it; None, and `number` is kept, if none is near."""
        copy = self.copies[number]
        if self.first[copy] >= 0:
            return 1.0, int(self.first[copy])
        shared = [(band, group) for band, group in enumerate(self.groups[number].tolist()) if group >= 0]
        similarity, other = self._nearest(number, shared)
        if similarity >= self.threshold:
            return similarity, other
        self.first[copy] = number
        for band, group in shared:
            self.links[self.rows[number], band] = self.heads[band, group]
            self.heads[band, group] = number
        return None

    def _nearest(self, number: int, shared: list[tuple[int, int]]) -> tuple[float, int]:
        candidates = set()
        for band, group in shared:
            other = int(self.heads[band, group])
            while other >= 0:
                candidates.add(other)
                other = int(self.links[self.rows[other], band])
        if not candidates:
            return 0.0, 0
        own = self._signature(number)
        # The standard deviation of the estimate is at most 0.5 / sqrt(128) = 0.044: skip candidates four below.
        near = [p for p in sorted(candidates) if np.mean(self._signature(p) == own) > self.threshold - 0.18]
        return max(((self._similarity(number, p), p) for p in near), key=lambda n: (n[0], -n[1]), default=(0.0, 0))

    def _similarity(self, a: int, b: int) -> float:
        size = max(self.documents[a].num_bytes, self.documents[b].num_bytes)
        if size <= BLOCK:
            return jaccard(self.shingles_of(a), self.shingles_of(b))
        top = np.uint64(min(MAX, MAX * LONG // size))
        return jaccard(self._shingles(a, top), self._shingles(b, top))

    def _shingles(self, number: int, top: np.uint64 | None = None) -> np.ndarray:
        found = self.shingler.hashes(self.documents[number].pieces(BLOCK))
        return np.unique(np.concatenate([h if top is None else h[h <= top] for h in found]))

    def _signature(self, number: int) -> np.ndarray:
        self.signatures.seek(number * 8 * BINS)
        return np.frombuffer(self.signatures.read(8 * BINS), np.uint64)


def _digest(document: AnyDocument) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for piece in document.pieces(BLOCK):
        digest.update(piece.encode())
    return digest.digest()


def _groups(keys: np.ndarray) -> np.ndarray:
    """The number of the group of equal keys that each key is in, -1 for one that is alone."""
    _, group, count = np.unique(keys, return_inverse=True, return_counts=True)
    shared = count > 1
    return np.where(shared, np.cumsum(shared) - 1, -1).astype(np.int32)[group]


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Similarity of two sets of shingles, given as sorted arrays of unique values."""
    both = np.intersect1d(a, b, assume_unique=True).size
    return both / (a.size + b.size - both)


class Shingler:
    """Hash functions drawn from `seed`. The arithmetic is modulo 2^64, as in NumPy's uint64."""

    def __init__(self, seed: int) -> None:
        random = np.random.Generator(np.random.Philox(key=seed))
        top = np.iinfo(np.uint64).max

        def odd(n: int) -> np.ndarray:
            return random.integers(0, top, size=n, dtype=np.uint64) | np.uint64(1)

        self.byte = random.integers(0, top, size=256, dtype=np.uint64)
        self.double = odd(SHINGLE.bit_length() - 1)
        self.row = odd(ROWS)
        self.borrow = random.permuted(np.tile(np.arange(BINS), (BINS, 1)), axis=1)  # search order of an empty bin
        self.starts = np.arange(BINS, dtype=np.uint64) << np.uint64(64 - BIN_BITS)

    def hashes(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The sorted hashes of the shingles of each piece of a text; a shingle over a border belongs to the later
        piece. A text shorter than one shingle is padded with zeros."""
        kept, spaced, short = b"", False, True
        for piece in pieces:
            text = re.sub(r"\s+", " ", piece)
            data = kept + (text.removeprefix(" ") if spaced else text).encode(errors="surrogatepass")
            spaced = text.endswith(" ") if text else spaced
            if len(data) >= SHINGLE:
                short = False
                yield self._hashed(data)
            kept = data[-(SHINGLE - 1) :]
        if short:
            yield self._hashed(kept.ljust(SHINGLE, b"\0"))

    def _hashed(self, data: bytes) -> np.ndarray:
        """The hash of 2n bytes is computed from the hashes of its halves: 32 bytes take five passes over the text, not
        32."""
        h = self.byte[np.frombuffer(data, np.uint8)]
        for level, factor in enumerate(self.double):
            n = 1 << level
            h = h[:-n] * factor + h[n:]
        return np.unique(mixed(h))

    def signature(self, hashes: Iterable[np.ndarray]) -> np.ndarray:
        """[BINS]: the smallest hash of each bin; in sorted order, the first one from the start of the bin."""
        bins = np.arange(BINS, dtype=np.uint64)
        full, least = np.zeros(BINS, bool), np.zeros(BINS, np.uint64)
        for shingles in hashes:
            found = shingles[np.minimum(np.searchsorted(shingles, self.starts), shingles.size - 1)]
            better = (found >> np.uint64(64 - BIN_BITS) == bins) & (~full | (found < least))
            least[better] = found[better]
            full |= better
        lender = self.borrow[np.arange(BINS), full[self.borrow].argmax(axis=1)]
        return least[np.where(full, np.arange(BINS), lender)]

    def bands(self, signature: np.ndarray) -> np.ndarray:
        """[BANDS] uint64: keys are equal if the rows of the band are equal, and otherwise with probability 2^-64."""
        return mixed((signature.reshape(BANDS, ROWS) * self.row).sum(axis=1, dtype=np.uint64))


def mixed(h: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer: the high bits, which select the bin, depend on all bits."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))
