"""The test suite of JSON Schema (drafts 4 to 2020-12), against the grammars that schemas are compiled to.

`make test-peers` takes the suite from the source package of jsonschema, which contains it. For every schema that is not
refused, the grammar must accept the valid instances and no invalid one, and texts drawn from it must be valid. The
differences are committed in json_schema_exceptions.json, and the test fails if there is another one, or one less:

    schemas    how many there are, and `texts` how many were drawn
    refused    why schemas are refused, and how many: a request with one gets a 400
    accepted   invalid instances that the grammar accepts
    rejected   valid instances that the grammar does not generate
    invalid    drawn texts that do not satisfy the schema

`python tests/peers/test_json_schema_suite.py` writes the file.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from bagu.bench.words import WordTokenizer
from bagu.serve.constrain.compiler import GrammarCompiler
from bagu.serve.grammar import Grammar
from bagu.serve.request import Unservable

EXCEPTIONS = Path(__file__).with_name("json_schema_exceptions.json")
SUITE = Path(sys.prefix) / "json-schema-suite" / "json" / "tests"
DRAFTS: dict[str, Any] = {
    "draft4": jsonschema.Draft4Validator, "draft6": jsonschema.Draft6Validator, "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator, "draft2020-12": jsonschema.Draft202012Validator,
}  # fmt: skip
HUGE = re.compile(r"[eE][-+]?[0-9]{4}")  # numbers that a validator cannot hold
TEXTS, LONGEST = 6, 60  # texts drawn from each grammar, and their tokens


def groups(draft: str) -> Iterator[tuple[str, Any]]:
    """(file: description, group) of every schema of the suite that has no option of the draft. Schemas name their
    draft; numbers are decimals, for the validator: 0.7593 is a multiple of 0.0001."""
    for path in sorted((SUITE / draft).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8"), parse_float=Decimal):
            if isinstance(group["schema"], dict):
                name = DRAFTS[draft].META_SCHEMA.get("$id") or DRAFTS[draft].META_SCHEMA["id"]
                group["schema"] = {"$schema": name, **group["schema"]}
            yield f"{path.stem}: {group['description']}", group


def drawn(matcher: Any, tokenizer: WordTokenizer, generator: random.Random) -> str | None:
    """A text of the grammar; None if it has no end within `LONGEST` tokens."""
    ids: list[int] = []
    while len(ids) < LONGEST:
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little").nonzero()[0]
        others = [int(id) for id in allowed if id != tokenizer.eos_id]
        if len(others) < len(allowed) and (not others or generator.random() < 0.4):
            return tokenizer.decode(ids)
        ids.append(generator.choice(others))
        assert matcher.try_consume_tokens(ids[-1:]) == 1
    return None


def differences(draft: str) -> dict[str, Any]:
    tokenizer = WordTokenizer([b'{"foo": 1, "bar": [true, false, null]}'], 400)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    generator, refused = random.Random(0), Counter[str]()
    found: dict[str, Any] = {"schemas": 0, "texts": 0, "accepted": [], "rejected": [], "invalid": []}
    for name, group in groups(draft):
        found["schemas"] += 1
        try:
            start = compiler.matcher(Grammar.json_schema(json.loads(json.dumps(group["schema"], default=float))))
        except Unservable as error:
            refused[str(error).split("\n")[0][:100]] += 1
            continue
        for test in group["tests"]:
            matcher = start.deep_copy()
            ids = tokenizer.encode(json.dumps(test["data"], ensure_ascii=False, default=float))
            accepts = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
            if accepts != test["valid"]:
                found["accepted" if accepts else "rejected"].append(f"{name}: {test['description']}")
        judge = DRAFTS[draft](group["schema"])
        for _ in range(TEXTS):
            text = drawn(start.deep_copy(), tokenizer, generator)
            if text is not None and not HUGE.search(text):
                found["texts"] += 1
                if not judge.is_valid(json.loads(text, parse_float=Decimal)):
                    found["invalid"].append(f"{name}: {text}")
    return {**found, "refused": dict(sorted(refused.items()))}


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_differences_to_json_schema_are_the_committed_ones(draft: str) -> None:
    assert SUITE.is_dir(), f"there is no suite at {SUITE}: run make test-peers"
    found = differences(draft)
    counts = {name: value if isinstance(value, int) else len(value) for name, value in found.items()}
    print(draft, {**counts, "refused": sum(found["refused"].values())})
    assert found["invalid"] == [] and found["accepted"] == []
    assert found == json.loads(EXCEPTIONS.read_text(encoding="utf-8"))[draft]


if __name__ == "__main__":
    pytest.importorskip("llguidance")
    written = json.dumps({draft: differences(draft) for draft in DRAFTS}, indent=1, ensure_ascii=False)
    EXCEPTIONS.write_text(written + "\n", encoding="utf-8")
