"""Passages have exact offsets, keep to the budget, and leave no word out; terms fold what a reader would."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bagu.errors import ArgumentError
from bagu.retrieve.read import Unreadable, extract
from bagu.retrieve.split import Chunking, split, tokens
from bagu.retrieve.words import terms

PIECES = ["# Title\n", "## Part\n", "def f(x):\n", "    def g(self):\n"]
PIECES += ["word ", "句子。", "a" * 90, "\n\n", "\r\n", "\ufeff", "😀", "é ", ". "]


@settings(max_examples=200)
@example(text="# Title\n    def g(self):\n    def g(self):\n\ufeffé     def g(self):\nword é ", kind="text", overlap=0)
@given(
    text=st.lists(st.sampled_from(PIECES), max_size=120).map("".join),
    kind=st.sampled_from(["text", "markdown", "python"]),
    overlap=st.sampled_from([0, 4, 8]),
)
def test_every_character_is_in_a_passage_at_its_offset(text: str, kind: str, overlap: int) -> None:
    spans = split(text, kind, Chunking(size=16, overlap=overlap))
    covered = set()
    for span in spans:
        piece = text[span.start : span.end]
        assert piece and piece == piece.strip()
        assert span.line == text.count("\n", 0, span.start) + 1
        assert tokens(piece) <= 16 + overlap + 1
        covered.update(range(span.start, span.end))
    assert all(character.isspace() for at, character in enumerate(text) if at not in covered)
    assert [s.start for s in spans] == sorted(s.start for s in spans)


def test_structure_decides_where_passages_begin() -> None:
    code = "import os\n\n" + "".join(f"def f{i}(x):\n    return {i} * {'x + ' * 8}1\n\n\n" for i in range(6))
    spans = split(code, "python", Chunking(size=24))
    assert [s.title for s in spans[1:]] == [f"f{i}" for i in range(1, 6)]
    assert all(code[s.start :].startswith("def f") for s in spans[1:])
    page = "# One\n\n" + "alpha beta. " * 20 + "\n\n# Two\n\ngamma"
    assert split(page, "markdown", Chunking(size=64))[-1].title == "Two"


def test_sizes_that_cannot_work_are_refused() -> None:
    for wrong in ({"size": 8}, {"size": 64, "overlap": 33}):
        with pytest.raises(ArgumentError):
            Chunking(**wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Writes writing write", ["writ"] * 3),
        ("readFile_v2", ["readfile_v2", "read", "fil", "v", "2"]),
        ("HTTPServer", ["httpserver", "http", "server"]),
        ("故乡的山", ["故乡", "乡的", "的山"]),
        ("用Python写", ["用", "python", "写"]),
        ("Ｆｕｌｌ ｗｉｄｔｈ", ["full", "width"]),
        ("Ünïcode naïve", ["ünïcode", "naïve"]),
        ("东京 서울", ["东京", "서울"]),
        ("__ -- ()", []),
    ],
)
def test_terms(text: str, expected: list[str]) -> None:
    assert list(terms(text)) == expected


@pytest.mark.parametrize(
    ("kind", "data", "text"),
    [
        ("html", b"<p>a &amp; b<script>evil()</script><style>x</style><p>c", "a & b\nc"),
        ("json", b'{"a": {"b": ["\\u6545\\u4e61", 1]}, "c": null}', "a.b: 故乡\na.b: 1"),
        ("json", b'"\\ud800"', "?"),
        ("jsonl", b'{"t": "x"}\n\n{"t": "y"}\n', "t: x\n\nt: y"),
        ("text", b"\xef\xbb\xbfbom\r\nline", "bom\r\nline"),
        ("text", "故乡".encode("utf-16"), "故乡"),
        (
            "text",
            "他是这个地方的人，不是我们来的时候说的那个人。".encode("gb18030"),
            "他是这个地方的人，不是我们来的时候说的那个人。",
        ),
    ],
)
def test_text_of_other_formats(kind: str, data: bytes, text: str) -> None:
    assert extract(data, kind) == text


@pytest.mark.parametrize(
    ("kind", "data", "why"),
    [
        ("text", b"a\0b", "zero bytes"),
        ("text", "故乡".encode("gb18030"), "not UTF"),
        ("json", b"{", "not JSON"),
        ("json", b"[" * 100_000, "not JSON"),
        ("jsonl", b'{}\n{"a"\n', "line 2 is not JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_sentence(kind: str, data: bytes, why: str) -> None:
    with pytest.raises(Unreadable, match=why) as error:
        extract(data, kind)
    assert "\n" not in str(error.value)
