"""The token store: round trips in memory and on disk; an incomplete store is refused."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.data import BpeTokenizer, Document, TokenDocument, TokenStore, build, in_memory, on_disk
from bagu.errors import BaguError

token_lists = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=20), min_size=1, max_size=12)
ONES = np.ones(100, np.int32)


def token_documents(lists: list[list[int]], *, masked: bool = False) -> list[TokenDocument]:
    return [
        TokenDocument(id=f"dok/{i}é", tokens=ids, mask=[t % 2 for t in ids] if masked else None)
        for i, ids in enumerate(lists)
    ]


@settings(max_examples=40, derandomize=True)
@given(token_lists, st.booleans(), st.integers(0, 25), st.integers(0, 25))
def test_round_trip_in_memory_and_on_disk(
    tmp_path_factory: pytest.TempPathFactory, lists: list[list[int]], masked: bool, start: int, length: int
) -> None:
    documents = token_documents(lists, masked=masked)
    cache = tmp_path_factory.mktemp("cache")
    for store in (in_memory(documents, token_bytes=ONES), on_disk(documents, cache, token_bytes=ONES, facts={})):
        assert store.num_documents == len(lists)
        assert store.lengths.tolist() == [len(ids) for ids in lists]
        assert store.lengths.dtype == np.int64
        assert store.num_tokens == store.num_bytes() == sum(map(len, lists))
        for i, ids in enumerate(lists):
            assert store.document_id(i) == f"dok/{i}é"
            assert store.length(i) == len(ids)
            assert store.tokens(i).tolist() == ids
            assert store.tokens(i, start, start + length).tolist() == ids[start : start + length]
            mask = store.mask(i, start, start + length)
            assert (mask is not None) == masked
            if mask is not None:
                assert mask.tolist() == [t % 2 for t in ids[start : start + length]]


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_ids_are_as_narrow_as_the_vocabulary_allows(vocab: int, dtype: type) -> None:
    store = in_memory([TokenDocument(id="a", tokens=[vocab - 1, 0])], token_bytes=np.ones(vocab))
    assert store.flat.dtype == dtype
    assert store.tokens(0).tolist() == [vocab - 1, 0]


TEXTS = ["def f():\n    return 1\n", "<|endoftext|> is text here", "你好\n"]
DOCUMENTS = [Document(id=f"{i}.py", text=text) for i, text in enumerate(TEXTS)]
TOKENIZER = BpeTokenizer.train(TEXTS, vocab_size=300)


def test_each_document_has_one_end_of_text_token_at_its_end(tmp_path: Path) -> None:
    store = build(DOCUMENTS, TOKENIZER, tmp_path, source={"sha256": "x"})
    for i, text in enumerate(TEXTS):
        *ids, last = store.tokens(i).tolist()
        assert last == TOKENIZER.eos_id
        assert TOKENIZER.eos_id not in ids
        assert TOKENIZER.decode(ids) == text
    assert store.num_bytes() == sum(len(t.encode()) for t in TEXTS)
    assert store.facts["tokenizer"] == TOKENIZER.fingerprint
    assert store.facts["source"] == {"sha256": "x"}
    assert np.array_equal(store.token_bytes, TOKENIZER.token_bytes)


def test_a_store_is_built_once_per_facts(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    first = build(DOCUMENTS, TOKENIZER, tmp_path, source={"sha256": "x"}, progress=lambda d, t: seen.append((d, t)))
    assert [d for d, _ in seen] == [1, 2, 3]
    assert seen[-1][1] == first.num_tokens

    def unread() -> Iterator[Document]:
        raise AssertionError("the store is there, nothing is to be read")
        yield

    again = build(unread(), TOKENIZER, tmp_path, source={"sha256": "x"})
    assert np.array_equal(again.flat, first.flat)
    assert build(DOCUMENTS[:1], TOKENIZER, tmp_path, source={"sha256": "y"}).num_documents == 1
    other = BpeTokenizer.train(TEXTS, vocab_size=270)
    assert not np.array_equal(build(DOCUMENTS, other, tmp_path, source={"sha256": "x"}).flat, first.flat)
    assert len(list(tmp_path.iterdir())) == 3


def test_another_end_of_text_token_is_another_store(tmp_path: Path) -> None:
    """A base and a chat model may share tokenizer.json, and differ in eos_token of tokenizer_config.json."""
    chat = replace(TOKENIZER, eos_token="<|end|>")
    assert chat.fingerprint == TOKENIZER.fingerprint and chat.eos_id != TOKENIZER.eos_id
    for tokenizer in (TOKENIZER, chat):
        store = build(DOCUMENTS, tokenizer, tmp_path, source={"sha256": "x"})
        assert store.tokens(0)[-1] == tokenizer.eos_id


def test_a_build_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def failing() -> Iterator[TokenDocument]:
        yield TokenDocument(id="a", tokens=[1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        on_disk(failing(), tmp_path, token_bytes=ONES, facts={})
    assert list(tmp_path.iterdir()) == []
    assert on_disk(token_documents([[1]]), tmp_path, token_bytes=ONES, facts={}).num_documents == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_a_full_disk_is_an_error_and_other_stores_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_disk(token_documents([[1, 2]]), tmp_path, token_bytes=ONES, facts={"n": 1})
    real = Path.open

    def full(self: Path, mode: str = "r", **kw: object) -> object:
        return (
            real(Path("/dev/full"), mode, **kw) if self.name == "tokens.npy" and "w" in mode else real(self, mode, **kw)
        )

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(BaguError, match="cannot write") as caught:
        on_disk(token_documents([[1] * 100_000]), tmp_path, token_bytes=ONES, facts={"n": 2})
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["tokens.npy", "offsets.npy", "name_offsets.npy", "facts.json"])
def test_an_incomplete_store_is_refused(tmp_path: Path, name: str) -> None:
    on_disk(token_documents([[1, 2, 3], [4]]), tmp_path, token_bytes=ONES, facts={"source": "some text"})
    (folder,) = tmp_path.iterdir()
    complete = (folder / name).read_bytes()
    for content in (complete[:-2], complete[:20], b"", None):
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
        with pytest.raises(BaguError, match="is not a complete token store") as caught:
            TokenStore.open(folder)
        assert "delete the folder" in caught.value.hint


def test_an_array_of_another_length_is_refused(tmp_path: Path) -> None:
    on_disk(token_documents([[1, 2, 3]], masked=True), tmp_path, token_bytes=ONES, facts={})
    (folder,) = tmp_path.iterdir()
    np.save(folder / "mask.npy", np.ones(2, np.uint8))
    with pytest.raises(BaguError, match="lengths do not match"):
        TokenStore.open(folder)


def test_two_concurrent_builds_share_the_first_result(tmp_path: Path) -> None:
    documents = token_documents([[7] * 50, [8]])

    def overtaken() -> Iterator[TokenDocument]:
        yield documents[0]
        on_disk(documents, tmp_path, token_bytes=ONES, facts={})  # another process, while this one writes
        yield documents[1]

    assert on_disk(overtaken(), tmp_path, token_bytes=ONES, facts={}).lengths.tolist() == [50, 1]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("documents", "says"),
    [
        ([], "no document"),
        ([TokenDocument(id="a", tokens=[])], "'a' has no tokens"),
        ([TokenDocument(id="a", tokens=[1, 100])], "'a' has token id 100, but the vocabulary has 100 tokens"),
        ([TokenDocument(id="a", tokens=[-1])], "token id -1"),
        ([TokenDocument(id="a", tokens=[1], mask=[1, 0])], "needs a loss mask of 1 zeros and ones"),
        ([TokenDocument(id="a", tokens=[1], mask=[2])], "needs a loss mask"),
        (
            [TokenDocument(id="a", tokens=[1]), TokenDocument(id="b", tokens=[1], mask=[1])],
            "'b' is the first to differ",
        ),
        (
            [TokenDocument(id="a", tokens=[1], mask=[1]), TokenDocument(id="b", tokens=[1])],
            "'b' is the first to differ",
        ),
    ],
)
def test_bad_documents_are_named(tmp_path: Path, documents: list[TokenDocument], says: str) -> None:
    with pytest.raises(BaguError, match=says):
        in_memory(documents, token_bytes=ONES)
    with pytest.raises(BaguError, match=says):
        on_disk(documents, tmp_path, token_bytes=ONES, facts={})
    assert list(tmp_path.iterdir()) == []


def test_an_index_out_of_range_does_not_wrap_around() -> None:
    store = in_memory(token_documents([[1], [2]]), token_bytes=ONES)
    for read in (store.tokens, store.length, store.document_id):
        for index in (-1, 2):
            with pytest.raises(IndexError, match=f"document {index} of 2"):
                read(index)
