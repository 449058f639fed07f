"""Sources: the same documents in the same order; errors name the file, line or field."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from bagu.data import ChatJsonlSource, JsonlSource, ParquetSource, TextSource, open_source
from bagu.errors import BaguError


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_text_files_are_sorted_and_unchanged(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "two\r\n\ttabs\x00 and more\n")
    write(tmp_path / "a" / "z.txt", "één")
    write(tmp_path / "empty.txt", "")
    write(tmp_path / "c.md", "\ufeff# marked")  # a byte-order mark is no text
    found = {d.id: d.text for d in TextSource(tmp_path).documents()}
    assert list(found.items()) == [("a/z.txt", "één"), ("b.txt", "two\r\n\ttabs\x00 and more\n"), ("c.md", "# marked")]
    assert TextSource(tmp_path).note == ""
    assert TextSource(tmp_path).describe()["empty_files"] == 1
    assert [d.id for d in TextSource(tmp_path / "b.txt").documents()] == ["b.txt"]


def test_the_corpus_hash_covers_names_and_content_not_the_location(tmp_path: Path) -> None:
    def sha(folder: str, **files: str) -> str:
        for name, text in files.items():
            write(tmp_path / folder / f"{name}.txt", text)
        return TextSource(tmp_path / folder).describe()["sha256"]

    first = sha("one", a="x", b="y")
    assert sha("two", b="y", a="x") == first
    assert len({first, sha("three", a="y", b="x"), sha("four", a="x", c="y"), sha("five", a="xy", b="")}) == 4


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.ndjson"])
def test_json_lines(tmp_path: Path, name: str) -> None:
    lines = b'{"text": "a\\u00e9 \\ud83d\\ude00", "n": 1}\n\n{"text": ""}\n{"text": "last"}'
    path = write(tmp_path / name, gzip.compress(lines) if name.endswith("gz") else lines)
    source = open_source(path)
    assert isinstance(source, JsonlSource)
    assert [(d.id, d.text) for d in source.documents()] == [(f"{name}:1", "aé 😀"), (f"{name}:4", "last")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"text": "a"', "not JSON: Expecting"),
        (b'{"text": "\xff"}', "not JSON: 'utf-8' codec"),
        (b'["text"]', "expected a JSON object, got a list"),
        (b'{"txt": 1, "lang": 2}', "no field 'text'"),
        (b'{"text": 5}', "field 'text' is a int, not a string"),
        (b'{"text": "\\ud83d"}', "a lone surrogate at character 0"),
        (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "not JSON: Exceeds the limit"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path: Path, line: bytes, says: str) -> None:
    path = write(tmp_path / "rows.jsonl", b'{"text": "fine"}\n' + line + b"\n")
    documents = JsonlSource(path).documents()
    assert next(documents).text == "fine"  # rows stream: those before the bad line are read
    with pytest.raises(BaguError) as caught:
        next(documents)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert says in str(caught.value)


DEEP = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, DEEP)
    with pytest.raises(BaguError, match="nested too deeply"):
        list(open_source(path).documents())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", '[{"text": "a"},\n {"text": "b"}]'),
        ("rows.json", '{"text": "a"}\n{"text": "b"}\n'),  # JSON lines in a .json file
        ("rows.json", '\ufeff{"text": "a"}\r\n{"text": "b"}\r\n'),
        ("rows.json.gz", '[{"text": "a"}, {"text": ""}, {"text": "b"}]'),
    ],
    ids=["list", "lines", "lines after a byte-order mark", "compressed"],
)
def test_a_json_file_is_data_not_text(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, gzip.compress(text.encode()) if name.endswith("gz") else text)
    for source in (open_source(path), open_source(tmp_path), open_source(tmp_path, "*.json*")):
        assert isinstance(source, JsonlSource)
        assert [d.text for d in source.documents()] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3", "holds a int; expected a list"),
        ('["a"]', "item 1: expected a JSON object"),
        ('{"name": "bagu"}', "item 1: no field 'text'"),
        ("Once upon a time", "not JSON"),
        ('{"text": "a"}\n{"text": ', "rows.json:2: not JSON"),
    ],
)
def test_a_json_file_without_rows_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "rows.json", text)
    with pytest.raises(BaguError, match=said):
        list(open_source(path).documents())


def test_a_json_file_beside_other_data_is_metadata(tmp_path: Path) -> None:
    """For example dataset_info.json in a Hugging Face dataset."""
    write(tmp_path / "a.txt", "plain")
    write(tmp_path / "dataset_info.json", "{}")
    assert [d.text for d in open_source(tmp_path).documents()] == ["plain"]


def test_a_missing_field_lists_the_known_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", '{"body": "x", "lang": "en"}\n')
    with pytest.raises(BaguError) as caught:
        list(JsonlSource(path).documents())
    assert "body, lang" in caught.value.hint
    assert [d.text for d in JsonlSource(path, field="body").documents()] == ["x"]


def test_chats(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "你好", "name": "b"}]
    path = write(tmp_path / "chat.jsonl", json.dumps({"messages": messages}) + "\n")
    (chat,) = ChatJsonlSource(path).conversations()
    assert chat.id == "chat.jsonl:1"
    assert list(chat.messages) == messages
    for bad in ({"messages": []}, {"text": "x"}, {"messages": ["hi"]}, {"messages": [{"role": "user"}]},
                {"messages": [{"role": "user", "content": None}]}):  # fmt: skip
        write(path, json.dumps(bad))
        with pytest.raises(BaguError, match=r"chat\.jsonl:1: "):
            list(ChatJsonlSource(path).conversations())


def test_parquet_streams_rows_and_names_a_wrong_column(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    texts = [f"text {i}" for i in range(5)] + [None, ""]
    pq.write_table(pa.table({"text": texts, "n": list(range(7))}), tmp_path / "x.parquet", row_group_size=2)
    found = [(d.id, d.text) for d in open_source(tmp_path).documents()]
    assert found == [(f"x.parquet:{i}", f"text {i}") for i in range(5)]
    encoded = pa.table({"text": pa.array(texts).dictionary_encode(), "n": list(range(7))})
    pq.write_table(encoded, tmp_path / "x.parquet")
    assert [(d.id, d.text) for d in open_source(tmp_path).documents()] == found
    with pytest.raises(BaguError, match="no column 'body'") as caught:
        list(ParquetSource(tmp_path, column="body").documents())
    assert "text, n" in caught.value.hint
    with pytest.raises(BaguError, match="holds int64; expected strings"):
        list(ParquetSource(tmp_path, column="n").documents())
    write(tmp_path / "x.parquet", b"PAR1 and then nothing")
    with pytest.raises(BaguError, match=r"cannot read .*x\.parquet as Parquet"):
        list(ParquetSource(tmp_path).documents())


def test_empty_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match="there is no file or folder"):
        list(TextSource(tmp_path / "gone").documents())
    with pytest.raises(BaguError, match=r"no file under .* is a text file"):
        list(TextSource(tmp_path).documents())
    empty = write(tmp_path / "empty.txt", "")
    with pytest.raises(BaguError, match="has no document with text"):
        list(TextSource(empty).documents())
    latin = write(tmp_path / "latin.txt", "één".encode("latin-1"))
    with pytest.raises(BaguError, match=r"latin\.txt is not UTF-8: invalid continuation byte at byte 0"):
        list(TextSource(latin).documents())
    torn = write(tmp_path / "torn.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 100)[:30])
    with pytest.raises(BaguError, match=r"cannot read .*torn\.jsonl\.gz"):
        list(JsonlSource(torn).documents())
    changed = bytearray(gzip.compress(b'{"text": "a"}\n' * 100))
    changed[10] = 0xFF  # no type of block
    with pytest.raises(BaguError, match=r"cannot read .*changed\.jsonl\.gz"):
        list(JsonlSource(write(tmp_path / "changed.jsonl.gz", bytes(changed))).documents())


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "fine")
    gone = write(tmp_path / "b.txt", "not for long")
    documents = TextSource(tmp_path).documents()
    assert next(documents).id == "a.txt"
    gone.unlink()
    with pytest.raises(BaguError, match=r"cannot read .*b\.txt: No such file"):
        next(documents)


def test_a_folder_of_two_kinds_needs_a_glob(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "plain")
    write(tmp_path / "readme.md", "marked down")
    assert [d.text for d in open_source(tmp_path).documents()] == ["plain", "marked down"]
    write(tmp_path / "deep" / "rows.jsonl", '{"text": "a row"}')
    with pytest.raises(BaguError, match=r"2 kinds: \*\*/\*\.jsonl\*, \*\*/\*\.txt") as caught:
        open_source(tmp_path)
    assert "--set sources.NAME.glob='**/*.txt'" in caught.value.hint
    for glob, text in (("**/*.txt", "plain"), ("**/*.md", "marked down"), ("**/*.jsonl", "a row")):
        assert [d.text for d in open_source(tmp_path, glob).documents()] == [text]
    with pytest.raises(BaguError, match="matches") as caught:
        list(open_source(tmp_path, "**/*.rst").documents())
    assert "--set sources.NAME.glob=" in caught.value.hint


@pytest.mark.parametrize("glob", ["/x/*.txt", "**x/*.txt"])
def test_a_pattern_that_cannot_be_used_is_named(tmp_path: Path, glob: str) -> None:
    write(tmp_path / "a.txt", "plain")
    with pytest.raises(BaguError, match=r"the pattern '.*' selects no files"):
        list(open_source(tmp_path, glob).documents())


def test_a_file_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "plain")
    latin = tmp_path / os.fsdecode(b"caf\xe9.txt")
    try:
        latin.write_text("plain")
    except (OSError, UnicodeEncodeError):
        pytest.skip("this file system has only Unicode names")
    for path in (tmp_path, latin):
        with pytest.raises(BaguError, match=r"the file name 'caf\\udce9\.txt' is not UTF-8"):
            open_source(path).describe()
