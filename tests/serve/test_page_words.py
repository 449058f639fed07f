"""The texts of the chat page exist in both languages, and none is unused. These tests need no browser."""

from __future__ import annotations

import re

from bagu.serve.page import assets

COMPUTED = {"finish_", "schema_", "tools_"}  # beginnings of keys that the page puts together


def test_every_text_of_the_page_has_words_and_every_word_is_used() -> None:
    files = {path: asset.body.decode() for path, asset in assets().items()}
    words = files.pop("/words.js")
    known = re.findall(r"^  (\w+): \[", words, re.MULTILINE)
    assert len(known) == len(set(known)) > 100
    code = "\n".join(files.values())
    asked = set(re.findall(r"\bt\(\"(\w+)\"", code)) | set(re.findall(r'data-t(?:-label|-hint)?="(\w+)"', code))
    assert asked <= set(known)
    quoted = set(re.findall(r'"(\w+)"', code)) | asked
    settings = set(re.findall(r'name: "(\w+)"', files["/settings.js"]))
    unused = {key for key in known if key not in quoted | settings and not key.startswith(tuple(COMPUTED))}
    assert unused == set()


def test_the_modules_import_files_that_exist_and_no_two_import_each_other() -> None:
    files = {path: asset.body.decode() for path, asset in assets().items() if path.endswith(".js")}
    imports = {path: {f"/{name}" for name in re.findall(r'from "\./([\w.]+)"', text)} for path, text in files.items()}
    assert set().union(*imports.values()) <= files.keys()
    done: list[str] = []
    while left := [path for path in imports if path not in done]:
        ready = [path for path in left if imports[path] <= set(done)]
        assert ready, f"a cycle among {left}"
        done += ready


def test_no_file_of_the_page_has_more_than_290_lines() -> None:
    long = {path: asset.body.count(b"\n") for path, asset in assets().items() if asset.body.count(b"\n") > 290}
    assert long == {}
