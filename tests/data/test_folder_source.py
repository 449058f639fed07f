"""A folder of mixed files: text of every kind is read, encodings are told, the rest is left out and named."""

from __future__ import annotations

import gzip
import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from bagu.data import BpeTokenizer, JsonlSource, TextSource, open_source
from bagu.data.document import LONG
from bagu.data.encoding import recognise
from bagu.errors import BaguError
from tests.command import bagu

CHINESE = "八股是一个软件包：训练、评测并部署一个语言模型。\n每个结论都可以在自己的机器上运行。\n"
ENGLISH = "One model and one set of kernels.\nEvery claim can be run here.\n"


def png() -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0\0")) + chunk(b"IEND", b"")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Notes and code as people have them."""
    root = tmp_path / "notes"
    for name in ("src", ".git", "pictures"):
        (root / name).mkdir(parents=True)
    (root / "readme.md").write_text(ENGLISH)
    (root / "src" / "main.py").write_text("print(1)\n")
    (root / "Makefile").write_text("all:\n\techo\n")
    (root / "notes.txt").write_bytes(CHINESE.encode("gb18030"))
    (root / "windows.txt").write_bytes(ENGLISH.encode("utf-16"))
    (root / "package.json").write_text("{}")
    (root / "pictures" / "one.png").write_bytes(png())
    (root / "pictures" / "two.png").write_bytes(png())
    (root / "old.txt").write_bytes("Größe für Übermut, schöne Straße\n".encode("latin-1"))
    with zipfile.ZipFile(root / "letter.docx", "w") as file:
        file.writestr("word/document.xml", "<w/>")
    (root / ".git" / "HEAD").write_text("ref")
    return root


def test_text_of_every_kind_is_read_and_the_rest_is_named(folder: Path) -> None:
    source = open_source(folder)
    assert {d.id: d.text for d in source.documents()} == {
        "Makefile": "all:\n\techo\n", "notes.txt": CHINESE, "readme.md": ENGLISH, "src/main.py": "print(1)\n",
        "windows.txt": ENGLISH,
    }  # fmt: skip
    assert source.note == (
        f"left out: 2 .png, 1 .json, 1 .docx, 1 in an unknown encoding (such as {folder / 'old.txt'}), hidden .git; "
        "1 decoded from GB18030; 1 decoded from UTF-16"
    )
    assert source.describe()["files"] == 5
    assert open_source(folder, "**/*.md").note == ""


@pytest.mark.parametrize("text", [CHINESE, ENGLISH], ids=["Chinese", "English"])
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "gb18030"]
)  # fmt: skip
def test_an_encoding_is_told_with_and_without_a_mark(tmp_path: Path, text: str, encoding: str) -> None:
    path = tmp_path / "text.md"
    path.write_bytes(text.encode(encoding))
    (document,) = open_source(path).documents()
    assert document.text == text
    cut = text.encode(encoding)[:51]  # the first bytes of a longer file, which end inside a character
    assert recognise(cut, complete=False) == ("utf-8" if encoding == "gb18030" and text is ENGLISH else encoding)


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("latin-1", "Größe für Übermut, schöne Straße"),
        ("cp1251", "Это русский текст для проверки кодировок"),
        ("koi8-r", "Это русский текст для проверки кодировок"),
        ("euc-kr", "한국어 텍스트는 모델이 학습하는 데 사용됩니다"),
        ("euc-jp", "これは日本語の文章です。東京は日本の首都であり、世界最大の都市の一つである。"),
        ("shift-jis", "これは日本語の文章です。東京は日本の首都であり、世界最大の都市の一つである。"),
        ("cp874", "นี่คือข้อความภาษาไทยสำหรับการทดสอบ"),
        ("big5", "這個模型學習寫程式，並且回答問題。我們在這裡測試繁體中文的編碼識別。"),
    ],
)
def test_another_encoding_is_not_taken_for_chinese(tmp_path: Path, encoding: str, text: str) -> None:
    path = tmp_path / "old.txt"
    path.write_bytes(text.encode(encoding))
    with pytest.raises(BaguError, match="is not UTF-8"):
        list(open_source(path).documents())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (png(), r"is a binary file \(PNG\), not text"),
        (b"%PDF-1.7\n1 0 obj\n<<>>\nendobj\n", r"is a binary file \(PDF\)"),
        (gzip.compress(b"text"), r"is a binary file \(gzip\)"),
        (bytes(range(256)), "is a binary file, not text"),
        (bytes(100), "is a binary file, not text"),
    ],
    ids=["png", "pdf", "gzip", "all bytes", "zeros"],
)
def test_a_binary_file_is_called_that(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "given.txt"
    path.write_bytes(data)
    with pytest.raises(BaguError, match=said):
        list(open_source(path).documents())


@pytest.mark.parametrize("encoding", ["gb18030", "utf-16", "utf-8-sig"])
def test_a_long_file_is_decoded_in_pieces(tmp_path: Path, encoding: str) -> None:
    path, text = tmp_path / "novel.txt", CHINESE * (LONG // 50)
    path.write_bytes(text.encode(encoding))
    assert path.stat().st_size > LONG
    (document,) = open_source(path).documents()
    assert "".join(document.pieces(1 << 20)) == text
    assert document.num_bytes == len(text.encode())
    assert document.between(8, 30, "part").text == text[8:30]
    with path.open("ab") as file:
        file.write(b"\xff\xff\xff")
    with pytest.raises(BaguError, match=f"{path} (is not UTF-8|begins as {encoding})"):
        _ = [d.text for d in open_source(path).documents()]


def test_rows_beside_a_readme_are_data(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("A dataset.")
    (tmp_path / "train.json").write_text('[{"text": "a row"}]')
    source = open_source(tmp_path)
    assert isinstance(source, JsonlSource)
    assert ([d.text for d in source.documents()], source.note) == (["a row"], "left out: 1 .md")
    (tmp_path / "main.py").write_text("print(1)")
    assert isinstance(open_source(tmp_path), TextSource)  # then .json is metadata
    (tmp_path / "more.ndjson").write_text('{"text": "a line"}')
    assert [d.text for d in open_source(tmp_path).documents()] == ["a line"]


def test_json_lines_in_another_encoding_say_so(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f'{{"text": "{CHINESE.strip().splitlines()[0]}"}}\n'.encode("gb18030"))
    with pytest.raises(BaguError) as caught:
        list(open_source(path).documents())
    assert caught.value.hint == "the file looks like gb18030; write it as UTF-8"


def test_train_says_what_it_left_out(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(20):
        (folder / f"{number}.md").write_text(f"{number}: {ENGLISH}")
    assert bagu("train", folder, "--out", tmp_path / "run", "--dry-run", "--set", "tokenizer.vocab_size=300") == 0
    assert "left out: 2 .png, 1 .json, 1 .docx, 1 in an unknown encoding" in capsys.readouterr().err
    assert bagu("tokenizer", "train", tmp_path / "tokenizer", folder, "--vocab-size", 300) == 0
    said = capsys.readouterr()
    assert "left out: 2 .png" in said.err and f"next: bagu tokenizer stats {tmp_path / 'tokenizer'}" in said.out
    assert BpeTokenizer.load(tmp_path / "tokenizer").vocab_size == 300
    assert bagu("train", folder / "pictures" / "one.png", "--out", tmp_path / "run", "--dry-run") == 2
    assert "one.png is a binary file (PNG), not text" in capsys.readouterr().err
