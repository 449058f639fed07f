"""The standard library as a corpus, and the pairs made from it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from bagu.data import Document, StdlibSource, sft_pairs
from bagu.errors import BaguError


def library(root: Path, files: dict[str, bytes]) -> StdlibSource:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return StdlibSource(root)


def test_the_running_library_is_a_corpus() -> None:
    source = StdlibSource()
    facts = source.describe()
    documents = list(source.documents())
    assert len(documents) > 300
    assert facts["bytes"] > 5_000_000
    assert len(documents) == facts["files"] - facts["empty_files"] - facts["undecodable_files"]
    ids = [d.id for d in documents]
    assert ids == sorted(ids)
    assert {"ast.py", "json/decoder.py"} <= set(ids)
    assert not [i for i in ids if {"site-packages", "test", "tests"} & set(i.split("/"))]


def test_other_files_are_left_out(tmp_path: Path) -> None:
    files = {
        "a.py": b"a = 1",
        "pkg/m.py": b"m = 1",
        "empty.py": b"",
        "latin.py": b"# coding: latin-1\nx = '\xe9'",
        "broken.py": b"# coding: utf-8\nx = '\xff'",
        "test/t.py": b"t = 1",
        "pkg/tests/t.py": b"t = 2",
        "_sysconfigdata_linux.py": b"prefix = 1",
        "config-3.11/python-config.py": b"prefix = 1",
        "site-packages/other.py": b"o = 1",
        "__pycache__/a.py": b"c = 1",
    }
    source = library(tmp_path, files)
    assert [d.id for d in source.documents()] == ["a.py", "latin.py", "pkg/m.py"]
    assert [d.text for d in source.documents()][1] == "# coding: latin-1\nx = 'é'"
    facts = source.describe()
    assert (facts["files"], facts["empty_files"], facts["undecodable_files"]) == (5, 1, 1)
    everything = StdlibSource(tmp_path, include_tests=True)
    assert [d.id for d in everything.documents()] == ["a.py", "latin.py", "pkg/m.py", "pkg/tests/t.py", "test/t.py"]


def test_a_library_inside_a_zip_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BaguError, match=r"not a folder of files: .*python311\.zip"):
        list(StdlibSource(tmp_path / "python311.zip").documents())


MODULE = '''
import os
\x0c
class A:
    @property
    def size(self):
        """How large it is.

        In bytes.
        """
        # counted once
        return self.n * 2

    async def later(self):
        """Not a plain function."""
        return 1

def bare(x):
    return x

def only_doc():
    """Nothing to learn."""

def one_line(): """doc"""; return 1

def spans():
    """Its string would change when dedented."""
    return 3

def outer(x):
    """Outer."""
    def inner(y):
        """Inner."""
        return """
  a text
"""
    return inner
'''


def test_pairs_ask_by_name_and_docstring_and_answer_with_the_code() -> None:
    pairs = {c.id.rsplit(":", 1)[1]: c for c in sft_pairs([Document(id="m.py", text=MODULE)])}
    assert list(pairs) == ["size", "spans", "outer"]  # dedenting would change inner's string
    assert pairs["size"].id == "m.py:6:size"
    user, assistant = pairs["size"].messages
    assert user == {"role": "user", "content": "Write the Python function size.\nHow large it is."}
    assert assistant["role"] == "assistant"
    assert assistant["content"] == "def size(self):\n    # counted once\n    return self.n * 2"


def test_long_answers_and_duplicates_are_left_out() -> None:
    one = 'def f():\n    """Doc."""\n    return 1\n'
    module = (
        f"if x:\n    {one.replace(chr(10), chr(10) + '    ')}\nelse:\n    {one.replace(chr(10), chr(10) + '    ')}\n"
    )
    assert len(list(sft_pairs([Document(id="m.py", text=module)]))) == 1
    assert list(sft_pairs([Document(id="m.py", text=module)], max_bytes=10)) == []
    assert list(sft_pairs([Document(id="m.py", text="def f(:\n")])) == []


def test_pairs_of_the_real_library_parse_and_define_the_asked_name() -> None:
    wanted = {"textwrap.py", "json/decoder.py", "shutil.py", "argparse.py", "statistics.py"}
    documents = [d for d in StdlibSource().documents() if d.id in wanted]
    pairs = list(sft_pairs(documents))
    assert len(pairs) > 60
    assert len({c.id for c in pairs}) == len(pairs)
    for pair in pairs:
        answer = pair.messages[1]["content"]
        (function,) = ast.parse(answer).body
        assert isinstance(function, ast.FunctionDef)
        assert answer.startswith(f"def {function.name}(")
        assert f" {function.name}." in pair.messages[0]["content"]
        assert ast.get_docstring(function) is None
        assert len(answer.encode()) <= 1024
