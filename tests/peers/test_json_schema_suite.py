"""The test suite of JSON Schema (draft 2020-12), against the grammars that schemas are compiled to.

`make test-peers` takes the suite from the source package of jsonschema, which contains it. For every schema that is not
refused, the grammar must accept the valid instances and no invalid one. The differences are committed in
json_schema_exceptions.json, and the test fails if there is another one, or one less:

    refused    schemas that llguidance does not support, and why: a request with one gets a 400
    accepted   invalid instances that the grammar accepts
    rejected   valid instances that the grammar does not generate

`python tests/peers/test_json_schema_suite.py` writes the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bagu.bench.words import WordTokenizer
from bagu.serve.constrain.compiler import GrammarCompiler
from bagu.serve.grammar import Grammar
from bagu.serve.request import Unservable

EXCEPTIONS = Path(__file__).with_name("json_schema_exceptions.json")
SUITE = Path(sys.prefix) / "json-schema-suite" / "json" / "tests" / "draft2020-12"


def groups() -> Iterator[tuple[str, Any]]:
    """(file: description, group) of every schema of the suite that has no option of the draft."""
    for path in sorted(SUITE.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            yield f"{path.stem}: {group['description']}", group


def differences() -> dict[str, Any]:
    tokenizer = WordTokenizer([b'{"foo": 1, "bar": [true, false, null]}'], 400)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    found: dict[str, Any] = {"refused": {}, "accepted": [], "rejected": []}
    for name, group in groups():
        try:
            start = compiler.matcher(Grammar.json_schema(group["schema"]))
        except Unservable as error:
            found["refused"][name] = str(error).split("\n")[0][:120]
            continue
        for test in group["tests"]:
            matcher = start.deep_copy()
            ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False))
            accepts = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            if accepts != test["valid"]:
                found["accepted" if accepts else "rejected"].append(f"{name}: {test['description']}")
    return found


def test_the_differences_to_json_schema_are_the_committed_ones() -> None:
    assert SUITE.is_dir(), f"there is no suite at {SUITE}: run make test-peers"
    assert sum(1 for _ in groups()) > 300
    expected = json.loads(EXCEPTIONS.read_text(encoding="utf-8"))
    assert differences() == expected


if __name__ == "__main__":
    pytest.importorskip("llguidance")
    EXCEPTIONS.write_text(json.dumps(differences(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
