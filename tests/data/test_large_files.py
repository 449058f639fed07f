"""Large files: pieces have the tokens, the split and the duplicates of the whole text, and memory does not grow."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, pre_tokenizers

from bagu.data import BpeTokenizer, Document, StdlibSource, build, deduplicate, hold_out
from bagu.data import document as documents_module
from bagu.data.dedup import Shingler
from bagu.data.document import LongDocument, Shelf
from bagu.data.source import TextSource
from bagu.data.split import sample
from bagu.data.tokenize import pieces, tokenize
from bagu.errors import BaguError

# characters of 1 to 4 bytes, runs of white space, digits, combining marks, words without spaces, symbols and newlines
PARTS = (
    "def f(self):\n",
    "    ",
    " \n\n",
    "12345678",
    "é",
    "e\u0301",
    "漢字かな，",
    "🙂👩\u200d🚀",
    "it's",
    "a_b",
    "\t\r\n",
    "...",
    " word",
    "ab",
)


def long(text: str, id: str = "a") -> LongDocument:
    data = text.encode()
    return LongDocument(id=id, read=lambda at, n: data[at : at + n], start=0, end=len(data), place=id)


def text_of(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(PARTS) * rng.choice((1, 1, 1, 2, 30)) for _ in range(count))


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return BpeTokenizer.train([text_of(0, 2000)], vocab_size=400)


def variants(tokenizer: BpeTokenizer) -> dict[str, BpeTokenizer]:
    """The same merges behind other rules for words and for the start of a text."""
    plain = tokenizers.Tokenizer.from_str(tokenizer.spec)
    llama3 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made = {"own": plain.to_str()}
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(llama3), behavior="isolated"), to_bytes]
    )
    made["llama3"] = plain.to_str()
    plain.normalizer = normalizers.NFC()
    made["qwen"] = plain.to_str()
    plain.normalizer = None
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made["prefix space"] = plain.to_str()
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("x"), normalizers.Replace(" ", "x")])
    made["prepend"] = plain.to_str()
    return {name: BpeTokenizer(spec=spec, eos_token=tokenizer.eos_token) for name, spec in made.items()}


@pytest.mark.parametrize("name", ["own", "llama3", "qwen", "prefix space", "prepend"])
@pytest.mark.parametrize("size", [3, 97])
def test_pieces_have_the_tokens_of_the_whole_text(tokenizer: BpeTokenizer, name: str, size: int) -> None:
    used, cuts = variants(tokenizer)[name], 0
    for seed in range(2):
        text = text_of(seed, 40 if size == 3 else 160)
        found = list(tokenize([long(text), Document(id="b", text=text)], used, piece=size, batch=1000))
        whole = [*used.encode(text), used.eos_id]
        for id in "ab":
            assert [t for d in found if d.id == id for t in d.tokens] == whole
        assert [d.id for d in found if d.ends] == ["a", "b"]
        cuts += len(found) - 2
    assert cuts > 10


def test_a_text_without_a_border_stays_in_one_piece(tokenizer: BpeTokenizer) -> None:
    (one,) = pieces(Document(id="a", text="a" * 5000), tokenizer, 7)
    assert one.ends and len(one.text) == 5000


def test_a_store_of_pieces_equals_one_of_whole_documents(tokenizer: BpeTokenizer, tmp_path: Path) -> None:
    texts = [text_of(seed, 60 * (seed + 1)) for seed in range(5)]
    whole = build([Document(id=str(i), text=t) for i, t in enumerate(texts)], tokenizer, tmp_path, source={"n": 1})
    from bagu.data.store_writer import in_memory

    cut = in_memory(
        tokenize([long(t, str(i)) for i, t in enumerate(texts)], tokenizer, piece=16), token_bytes=tokenizer.token_bytes
    )
    assert np.array_equal(whole.flat, cut.flat)
    assert np.array_equal(whole.offsets, cut.offsets)
    assert [cut.document_id(i) for i in range(5)] == list("01234")


@settings(derandomize=True, max_examples=60)
@given(st.text(alphabet="aé漢🙂\n ", min_size=2, max_size=80), st.floats(0.01, 0.99), st.integers(1, 9))
def test_a_long_document_is_read_and_split_as_one_in_memory(text: str, fraction: float, block: int) -> None:
    from unittest.mock import patch

    from bagu.data import split

    with patch.object(documents_module, "READ", block), patch.object(split, "PIECE", 5):
        one = long(text)
        assert one.text == text
        assert list(one.pieces(3)) == [text[i : i + 3] for i in range(0, len(text), 3)]
        at = split.end_of_training(one, fraction)
        train, held = hold_out([Document(id="a", text=text)], fraction=fraction)
        assert one.between(0, at, "a").text == train[0].text
        assert one.between(at, None, "a:end").text == held[0].text


def test_hashes_of_pieces_are_those_of_the_whole_text() -> None:
    text, shingler = text_of(3, 300), Shingler(0)
    (whole,) = shingler.hashes([text])
    for size in (1, 7, 40, 400):
        cut = list(shingler.hashes(long(text).pieces(size)))
        assert np.array_equal(np.unique(np.concatenate(cut)), whole)
        assert np.array_equal(shingler.signature(cut), shingler.signature([whole]))


def test_a_shelf_on_disk_gives_the_same_documents_duplicates_and_sample(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path))
    given = [d for d in StdlibSource().documents() if d.id.startswith(("encodings/cp", "json/"))]
    monkeypatch.setattr(documents_module, "IN_MEMORY", 1000)
    monkeypatch.setattr(documents_module, "LONG", 20_000)
    shelf = Shelf()
    for d in given:
        shelf.append(d)
    assert any(isinstance(d, LongDocument) for d in shelf)
    assert [(d.id, d.text) for d in shelf] == [(d.id, d.text) for d in given]
    assert deduplicate(shelf) == deduplicate(given)
    total = sum(d.num_bytes for d in given)
    assert total == sum(len(d.text.encode()) for d in given)
    wanted = {"max_bytes": total // 3, "total_bytes": total}
    assert list(sample(shelf, **wanted)) == list(sample(given, **wanted))


def test_large_near_duplicates_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagu.data import dedup

    monkeypatch.setattr(dedup, "BLOCK", 1 << 12)
    monkeypatch.setattr(dedup, "LONG", 1 << 14)
    words = [str(random.Random(1).random() + i) for i in range(8000)]
    near = [*words[:400], *words[500:]]
    texts = [" ".join(w) for w in (words, near, words[:4000], reversed(words))]
    kept, report = deduplicate([long(t, str(i)) for i, t in enumerate(texts)])
    assert kept == [0, 2, 3]
    assert report.removed[0].similarity == pytest.approx(7900 / 8000, abs=0.01)


def test_a_long_file_that_is_no_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse, zeros, latin = tmp_path / "sparse.txt", tmp_path / "zeros.txt", tmp_path / "latin.txt"
    with sparse.open("wb") as file:
        file.write(b"text\n")
        file.truncate(5 << 30)
    began = time.perf_counter()
    for refused in (TextSource(sparse).documents, TextSource(sparse).describe):
        with pytest.raises(BaguError, match=r"sparse\.txt is a sparse file: of its 5,368,709,120 bytes"):
            refused()
    assert time.perf_counter() - began < 5  # reading it would take longer, and 5 GB
    zeros.write_bytes(b"a\n" * (1 << 22) + bytes(1 << 21))
    latin.write_bytes(b"a\n" * (1 << 22) + b"\xe9" + b"b\n" * 9)
    for path, found in ((zeros, "65,536 zero bytes in a row"), (latin, f"not UTF-8.* at byte {1 << 23}")):
        (document,) = TextSource(path).documents()
        with pytest.raises(BaguError, match=found):
            list(document.pieces(100))


MEASURE = """
import resource, sys
from pathlib import Path
from bagu.data.corpus import Selection, SourceConfig, TextCorpus
from bagu.data.tokenizer import BpeTokenizer
from bagu.recipes.run import TokenizerConfig
from bagu.recipes.tokenizer import train_tokenizer
from bagu.train.objectives.language_modelling import text_stores
corpus = TextCorpus("a", SourceConfig(path=sys.argv[1]), Selection(dedup=0.8, validation=0.05, seed=0))
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
tokenizer = train_tokenizer({"a": corpus}, TokenizerConfig(vocab_size=512, max_mb=1))
stores = text_stores({"a": corpus}, tokenizer)["a"]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start, sum(s.num_bytes() for s in stores.values()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["one file", "lines"])
def test_memory_does_not_grow_with_the_corpus(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """6 MB take less than 300 MB more than the imports; 64 MB in one file took 7.5 GB."""
    monkeypatch.setenv("BAGU_CACHE", str(tmp_path / "cache"))
    text = re.sub(r"\n\n+", "\n", "".join(d.text for d in StdlibSource().documents()))[: 1 << 21]
    if layout == "one file":
        path = tmp_path / "large.txt"
        path.write_text(text * 3, encoding="utf-8")
    else:
        import json

        path = tmp_path / "large.jsonl"
        rows = (f"{n}{text[i : i + 4000]}" for n in range(3) for i in range(0, len(text), 4000))
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    done = subprocess.run([sys.executable, "-c", MEASURE, path], capture_output=True, text=True, check=True)
    kilobytes, stored = map(int, done.stdout.split())
    assert kilobytes < 300_000
    if layout == "one file":
        assert stored == path.stat().st_size
