"""Build a token store, in memory or on disk.

A stored folder is `<cache>/<key>`; the key is a hash of the facts that decide its content (source, tokenizer, split,
...). A change of any fact gives another folder, so a folder is never rewritten. A folder that exists is complete: it is
written under a temporary name, synced, and renamed.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from bagu.data.document import AnyDocument
from bagu.data.store import FACTS, TokenDocument, TokenStore
from bagu.data.tokenize import tokenize
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError

FORMAT = 1
Progress = Callable[[int, int], None]  # called with the documents and tokens so far


def build(
    documents: Iterable[AnyDocument],
    tokenizer: BpeTokenizer,
    cache: str | os.PathLike[str],
    *,
    source: Mapping[str, Any],
    progress: Progress | None = None,
) -> TokenStore:
    """The store of `documents` under `cache`: opened if it exists, else tokenized and written.

    `source` holds the JSON facts that decide the documents and their order (`describe()` of the source, the seed and
    fraction of a split, ...). `documents` is not read if the store exists, so a generator costs nothing in that case.
    """
    facts = {"source": dict(source), **tokenizer.token_facts}
    tokenized = tokenize(documents, tokenizer)
    return on_disk(tokenized, cache, token_bytes=tokenizer.token_bytes, facts=facts, progress=progress)


def in_memory(documents: Iterable[TokenDocument], *, token_bytes: np.ndarray) -> TokenStore:
    """A store in memory."""
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    _fill(documents, token_bytes, lambda name, values: parts[name].append(values), progress=None)
    return TokenStore.of({name: np.concatenate(values) for name, values in parts.items()}, facts={})


def on_disk(
    documents: Iterable[TokenDocument],
    cache: str | os.PathLike[str],
    *,
    token_bytes: np.ndarray,
    facts: Mapping[str, Any],
    progress: Progress | None = None,
) -> TokenStore:
    """The store with these `facts` under `cache`: opened if it exists, else written from `documents`."""
    text = json.dumps({"format": FORMAT, **facts}, sort_keys=True, indent=1)
    folder = Path(cache) / hashlib.sha256(text.encode()).hexdigest()[:16]
    if folder.exists():
        return TokenStore.open(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as scratch:
            draft = Path(scratch) / "store"
            _write(draft, documents, token_bytes, text, progress)
            _publish(draft, folder)
    except OSError as error:
        hint = "free some disk space, or use another cache folder; existing stores are unchanged"
        raise BaguError(f"cannot write the token store {folder}: {error}", hint=hint) from error
    return TokenStore.open(folder)


def _write(
    folder: Path, documents: Iterable[TokenDocument], token_bytes: np.ndarray, facts: str, progress: Progress | None
) -> None:
    """Write and sync all files of a store."""
    folder.mkdir()
    arrays: dict[str, _NpyFile] = {}
    with contextlib.ExitStack() as files:

        def put(name: str, values: np.ndarray) -> None:
            if name not in arrays:
                arrays[name] = _NpyFile(files.enter_context((folder / f"{name}.npy").open("wb")), values.dtype)
            arrays[name].append(values)

        _fill(documents, token_bytes, put, progress)
        for array in arrays.values():
            array.finish()
        file = files.enter_context((folder / FACTS).open("w", encoding="utf-8"))
        file.write(facts)
        file.flush()
        os.fsync(file.fileno())


def _publish(draft: Path, folder: Path) -> None:
    """Rename a finished store. If several processes build the same store, the first one wins."""
    try:
        draft.rename(folder)
    except OSError:
        if not folder.exists():
            raise


class _NpyFile:
    """A `.npy` file that grows. NumPy reserves 21 digits for the length in the header, so it can be written last."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.file, self.dtype, self.length = file, dtype, 0
        self._write_header()
        self.start = file.tell()

    def append(self, values: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(values).data)
        self.length += len(values)

    def finish(self) -> None:
        self.file.seek(0)
        self._write_header()
        assert self.file.tell() == self.start, "the header overlaps the data"
        self.file.flush()
        os.fsync(self.file.fileno())

    def _write_header(self) -> None:
        header = {"descr": npy.dtype_to_descr(self.dtype), "fortran_order": False, "shape": (self.length,)}
        npy.write_array_header_1_0(self.file, header)


def _fill(
    documents: Iterable[TokenDocument],
    token_bytes: np.ndarray,
    put: Callable[[str, np.ndarray], None],
    progress: Progress | None,
) -> None:
    """Pass the parts of every array to `put`, by name and in order. Either every document has a mask or none has."""
    dtype = np.uint16 if len(token_bytes) <= np.iinfo(np.uint16).max + 1 else np.uint32
    ends, name_ends, masked = array("q", [0]), array("q", [0]), False
    number, end = 0, 0
    for piece, document in enumerate(documents):
        ids, mask = _checked(document, len(token_bytes))
        masked = masked if piece else mask is not None
        if masked != (mask is not None):
            raise BaguError(
                f"some documents have a loss mask and some do not: document {document.id!r} is the first to differ"
            )
        put("tokens", ids.astype(dtype))
        if mask is not None:
            put("mask", mask)
        end += len(ids)
        if not document.ends:
            continue
        number += 1
        name = np.frombuffer(document.id.encode(), np.uint8)
        put("names", name)
        ends.append(end)
        name_ends.append(name_ends[-1] + len(name))
        if progress is not None:
            progress(number, end)
    if len(ends) == 1:
        raise BaguError("there are no documents to store", hint="check the source, and the fraction of the split")
    put("offsets", np.array(ends, np.int64))
    put("name_offsets", np.array(name_ends, np.int64))
    put("token_bytes", np.asarray(token_bytes, np.int32))


def _checked(document: TokenDocument, vocab_size: int) -> tuple[np.ndarray, np.ndarray | None]:
    """The document's arrays. Ids outside the vocabulary are refused: they would overflow when stored."""
    ids = np.asarray(document.tokens, np.int64)
    if not len(ids):
        raise BaguError(f"document {document.id!r} has no tokens", hint="leave it out")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise BaguError(
            f"document {document.id!r} has token id {wrong}, but the vocabulary has {vocab_size} tokens",
            hint="encode the documents with the tokenizer of the store",
        )
    if document.mask is None:
        return ids, None
    mask = np.asarray(document.mask, np.uint8)
    if mask.shape != ids.shape or mask.max() > 1:
        raise BaguError(f"document {document.id!r} needs a loss mask of {len(ids)} zeros and ones, got {mask!r:.80}")
    return ids, mask
