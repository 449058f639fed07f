"""An index follows its files, ranks by BM25, finds Chinese words, and says one sentence about what it cannot read."""

from __future__ import annotations

import json
import math
import os
import random
import sqlite3
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from bagu.cli import main
from bagu.errors import BaguError
from bagu.retrieve import postings
from bagu.retrieve.core import search
from bagu.retrieve.postings import K1, B
from bagu.retrieve.split import Chunking
from bagu.retrieve.store import Store
from bagu.retrieve.update import Update, update
from bagu.retrieve.words import terms

WORDS = [f"{a}{b}" for a in ("alpha", "beta", "pi", "rho") for b in ("", "x", "y", "z")]


def names(store: Store, query: str, k: int = 10) -> list[str]:
    return [Path(hit.passage.file).name for hit in search(store, query, k)]


def found(store: Store) -> set[str]:
    return {Path(path).name for path in store.files()}


def test_an_index_follows_its_files(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "a.md").write_text("# Apples\n\nred fruit\n")
    (docs / "b.txt").write_text("yellow bananas")
    with Store(tmp_path / "idx") as store:
        first = update(store, [docs])
        assert (first.added, first.passages, names(store, "fruits")) == (2, 2, ["a.md"])
        assert update(store, [docs]).unchanged == 2
        os.utime(docs / "a.md", (1, 1))  # touched, not changed
        assert (update(store, [docs]).unchanged, names(store, "apple")) == (2, ["a.md"])
        (docs / "b.txt").write_text("green pears")
        (docs / "a.md").rename(docs / "c.md")
        again = update(store, [docs])
        assert (again.added, again.changed, again.removed) == (1, 1, 1)
        assert (names(store, "banana"), names(store, "pears"), names(store, "apple")) == ([], ["b.txt"], ["c.md"])
        (docs / "c.md").unlink()
        assert (update(store, [docs]).removed, found(store)) == (1, {"b.txt"})
        assert update(store, [docs, docs / "b.txt"]).unchanged == 1  # the same file twice
    with Store(tmp_path / "idx", read_only=True) as store:
        (hit,) = search(store, "PEAR")
        assert hit.score == 1.0 and hit.ranks == {"words": 1} and hit.words == {"pear": 1}
        assert hit.passage.text == (docs / "b.txt").read_text()[hit.passage.start : hit.passage.end]


def bm25(passages: list[list[str]], query: list[str]) -> list[float]:
    """The definition, in Python's floats."""
    mean = sum(map(len, passages)) / len(passages)
    scores = []
    for passage in passages:
        counts, total = Counter(passage), 0.0
        for term in query:
            holders = sum(term in other for other in passages)
            idf = math.log(1 + (len(passages) - holders + 0.5) / (holders + 0.5))
            total += idf * counts[term] * (K1 + 1) / (counts[term] + K1 * (1 - B + B * len(passage) / mean))
        scores.append(total)
    return scores


def test_scores_are_those_of_the_definition_after_changes_and_merges(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts: dict[str, str] = {}
    with Store(tmp_path / "idx") as store:
        for step in range(40):  # more batches than MAX_SEGMENTS, so segments are merged; files change and go
            name = f"{rng.randrange(25)}.txt"
            texts[name] = " ".join(rng.choices(WORDS, k=rng.randrange(5, 40)))
            (tmp_path / name).write_text(texts[name])
            os.utime(tmp_path / name, (step, step))
            if step % 7 == 6:
                gone = rng.choice(sorted(texts))
                texts.pop(gone)
                (tmp_path / gone).unlink()
            update(store, [tmp_path])
        (segments,) = store.db.execute("SELECT count(*) FROM segments").fetchone()
        assert segments <= postings.MAX_SEGMENTS and found(store) == set(texts)
        order = [Path(store.passages([i])[0].file).name for i in range(store.meta("next")) if store.passages([i])]
        passages = [[*terms(texts[name]), *terms(Path(name).stem)] for name in order]
        for query in ("alpha beta", "pi pi rho", "12 rhox", "nothing"):
            expected = dict(zip(order, bm25(passages, list(terms(query))), strict=True))
            hits = search(store, query, 50)
            assert {Path(h.passage.file).name for h in hits} == {n for n, score in expected.items() if score > 0}
            for hit in hits:
                assert hit.bm25 == pytest.approx(expected[Path(hit.passage.file).name], rel=1e-5)
            assert [h.bm25 for h in hits] == sorted((h.bm25 for h in hits), reverse=True)


def test_a_planted_chinese_word_of_two_characters_is_always_found(tmp_path: Path) -> None:
    rng = random.Random(1)
    characters = [chr(0x4E00 + i) for i in range(400)]
    planted = {}
    for i in range(60):
        word = chr(0x5F00 + i) + chr(0x6F00 + i)
        text = "".join(rng.choices(characters, k=200))
        planted[word] = f"{i}.txt"
        (tmp_path / f"{i}.txt").write_text(text[:100] + word + text[100:], encoding="utf-8")
    with Store(tmp_path / "idx") as store:
        update(store, [tmp_path])
        assert {word: names(store, f"请问{word}在哪里？", 10)[:1] for word in planted} == {
            word: [file] for word, file in planted.items()
        }


@pytest.mark.parametrize(
    "query", ['"', "a OR", "NEAR(", "x* -y ^z", "col:val", "'; DROP TABLE files; --", "\0", "", "  ", "(" * 5000]
)
def test_a_query_has_no_syntax(tmp_path: Path, query: str) -> None:
    (tmp_path / "one.txt").write_text("plain words")
    with Store(tmp_path / "idx") as store:
        update(store, [tmp_path])
        assert search(store, query) == []
        assert names(store, f"{query} plain") == ["one.txt"]


def test_bad_files_are_one_sentence_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    (docs / "loop").mkdir(parents=True)
    (docs / "loop" / "again").symlink_to(docs, target_is_directory=True)
    (docs / "self.txt").symlink_to(docs / "self.txt")
    (docs / "copy.txt").symlink_to(docs / "good.txt")
    (docs / "good.txt").write_text("one good file")
    (docs / "crlf.txt").write_bytes(b"windows\r\nlines\r\n")
    (docs / "empty.txt").write_bytes(b"")
    (docs / "zero.txt").write_bytes(b"\0\0")
    (docs / "gb.txt").write_bytes("故乡".encode("gb18030"))
    (docs / "broken.json").write_text("{")
    (docs / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    (docs / "picture.png").write_bytes(b"\x89PNG")
    with (docs / "huge.txt").open("wb") as file:
        file.truncate(2 * 2**30)
    os.mkfifo(docs / "pipe.txt")
    os.close(os.open(os.fsencode(docs) + b"/\xff.txt", os.O_CREAT | os.O_WRONLY))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["index", "docs", "--out", "idx"])
    shown = capsys.readouterr()
    assert not end.value.code and "3 files, 2 passages" in shown.out
    left = {
        line.split(": ")[0].removeprefix("left out "): line for line in shown.err.splitlines() if "left out" in line
    }
    expected = {
        "docs/self.txt": "cannot be read", "docs/zero.txt": "zero bytes", "docs/gb.txt": "not UTF",
        "docs/broken.json": "not JSON", "docs/broken.pdf": "PDF", "docs/huge.txt": "2,147,483,648 bytes",
        "docs/pipe.txt": "regular file", "'docs/\\udcff.txt'": "not UTF-8",
    }  # fmt: skip
    assert left.keys() == expected.keys() and all(why in left[name] for name, why in expected.items())
    assert ".png (1)" in shown.err


def test_a_file_that_cannot_be_opened_or_changes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("before")
    read = Path.read_bytes

    def slow(path: Path) -> bytes:
        data = read(path)
        path.write_text("after it was read")
        return data

    with Store(tmp_path / "idx") as store:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", slow)
            assert "changed while it was read" in str(update(store, [tmp_path]).problems)
            patch.setattr(
                Path, "read_bytes", lambda path: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
            )
            assert "Permission denied" in str(update(store, [tmp_path]).problems)
        update(store, [tmp_path])
        assert names(store, "after") == ["a.txt"]


def test_files_that_are_no_index_and_a_second_writer_get_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("not a database, and longer than the header of one " * 10)
    sqlite3.connect(tmp_path / "other").execute("CREATE TABLE t(x)")
    for name, why in {
        "text": "not an index",
        "other": "not an index",
        ".": "folder",
        "none": "there is no index",
    }.items():
        with pytest.raises(BaguError, match=why):
            Store(tmp_path / name, read_only=True)
    monkeypatch.setattr("bagu.retrieve.store.BUSY_S", 0.05)
    with Store(tmp_path / "idx") as a, Store(tmp_path / "idx") as b, a.transaction():
        with pytest.raises(BaguError, match="another process is writing"), b.transaction():
            pass
        assert search(b, "readers do not wait") == []


def test_a_reader_sees_what_another_process_has_committed(tmp_path: Path) -> None:
    with Store(tmp_path / "idx") as writer, Store(tmp_path / "idx", read_only=True) as reader:
        assert names(reader, "later") == []
        (tmp_path / "a.txt").write_text("later")
        update(writer, [tmp_path])
        assert names(reader, "later") == ["a.txt"]


class Letters:
    """An embedder that can be computed by hand: how often each letter occurs."""

    digest, size, floor, name = "letters", 26, 0.5, "letters"

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.array([[text.count(chr(97 + i)) for i in range(26)] for text in texts], dtype=np.float32)

    def embed_query(self, text: str) -> np.ndarray:
        return np.asarray(self.embed([text])[0])


def test_vectors_are_searched_exactly_and_joined(tmp_path: Path) -> None:
    for name, text in {"a": "aaab", "b": "bbbb", "c": "cab", "d": "0 1 2"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    with Store(tmp_path / "idx") as store:
        update(store, [tmp_path], embedder=Letters())
        hits = search(store, "aab", embedder=Letters())
        assert [Path(h.passage.file).stem for h in hits] == ["a", "c"]  # b is below the floor, d has a vector of 0
        assert hits[0].cosine == pytest.approx(7 / math.sqrt(50), abs=1e-3) and hits[0].ranks == {"vectors": 1}
        hits = search(store, "cab", embedder=Letters())
        assert hits[0].ranks == {"words": 1, "vectors": 1} and hits[0].score == 1.0
        other = Letters()
        other.digest = "others"
        with pytest.raises(BaguError, match="another embedder"):
            search(store, "x", embedder=other)
        with pytest.raises(BaguError, match="has vectors of letters"):
            update(store, [tmp_path])


def test_the_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            main(list(words))
        return int(end.value.code or 0), capsys.readouterr().out

    monkeypatch.chdir(tmp_path)
    Path("docs").mkdir()
    Path("docs/notes.md").write_text("# Saving\n\nA checkpoint is written\nto a new folder.\n")
    assert run("index", "docs", "--size", "64")[0] == 0
    code, out = run("search", "idx", "writing checkpoints", "--explain")
    assert code == 0 and out.startswith("[1] docs/notes.md#L1-L4  1.00  Saving") and "checkpoint (in 1)" in out
    (hit,) = json.loads(run("search", "idx", "checkpoint", "--json")[1])
    assert hit["place"] == "docs/notes.md#L1-L4" and hit["passage"]["start"] == 0
    assert run("search", "idx", "zebra") == (1, "nothing found: no word of the query is in the 1 passages of idx\n")
    assert run("index", "docs")[0] == 2  # other sizes


def test_passages_of_a_batch_are_told_after_the_commit(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(f"file {i}")
    seen: list[str] = []

    def told(done: Update, paths: object) -> None:
        with Store(tmp_path / "idx", read_only=True) as reader:
            seen.append(f"{len(reader.files())} {done.added}")

    with Store(tmp_path / "idx") as store:
        update(store, [tmp_path], batch=12, chunking=Chunking(size=16), report=told)
    assert seen == ["2 2", "4 4", "6 6"]
