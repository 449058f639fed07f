"""Random schemas and random models: every finished output satisfies its schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from constrained import constrained_engine, constrained_model, json_tokenizer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.serve.grammar import Grammar
from bagu.serve.request import Sampling

NAMES = ("a", "name", "x y", 'q"', "é", "$ref")
SCALARS: st.SearchStrategy[Any] = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
              st.integers(-1000, 1000), st.integers(0, 500)),
    st.builds(lambda low, size: {"type": "number", "minimum": low, "exclusiveMaximum": low + size},
              st.integers(-9, 9), st.integers(1, 9)),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
              st.integers(0, 3), st.integers(0, 4)),
    st.sampled_from([
        {"type": "string", "pattern": "^[a-c]{1,3}(-[0-9]+)?$", "maxLength": 8}, {"type": "string", "format": "date"},
        {"enum": ["yes", "no", 3, None, {"k": [1]}]}, {"const": {"b": "c"}},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    ]),
)  # fmt: skip


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def of_object(properties: dict[str, Any], needed: int) -> dict[str, Any]:
        required = sorted(properties)[:needed]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    return st.one_of(
        st.builds(of_object, st.dictionaries(st.sampled_from(NAMES), inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
                  inner, st.integers(0, 2), st.integers(0, 2)),
        st.builds(lambda first, rest: {"type": "array", "prefixItems": first, "items": rest, "maxItems": 3},
                  st.lists(inner, min_size=1, max_size=2), inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda part: {"$ref": "#/$defs/part", "$defs": {"part": part}}, SCALARS),
    )  # fmt: skip


SCHEMAS = st.recursive(SCALARS, nested, max_leaves=5)


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return json_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: BpeTokenizer) -> Transformer:
    return constrained_model(tokenizer)


def root(schema: Any) -> Any:
    """The schema with the definitions of its parts at the root, where references look for them."""
    found: dict[str, Any] = {}

    def lift(node: Any) -> Any:
        if isinstance(node, list):
            return [lift(part) for part in node]
        if not isinstance(node, dict) or "const" in node or "enum" in node:
            return node
        if "$defs" in node:
            name = f"part{len(found)}"
            found[name] = node["$defs"]["part"]
            return {"$ref": f"#/$defs/{name}"}
        return {key: lift(value) for key, value in node.items()}

    lifted = lift(schema)
    return {**lifted, "$defs": found} if found else lifted


@settings(
    max_examples=25, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(schemas=st.lists(SCHEMAS.map(root), min_size=4, max_size=4), seed=st.integers(0, 2**31))
def test_every_finished_output_satisfies_its_schema(
    model: Transformer, tokenizer: BpeTokenizer, schemas: list[Any], seed: int
) -> None:
    engine = constrained_engine(init_weights(model, seed), tokenizer, async_scheduling=bool(seed % 2))
    asked = [
        Sampling(max_tokens=300, seed=seed, temperature=float(i), grammar=Grammar.json_schema(schema))
        for i, schema in enumerate(schemas)
    ]
    for schema, output in zip(schemas, engine.generate([[7, 8]] * len(schemas), asked), strict=True):
        bounded = (
            schema.get("type") in ("null", "boolean", "integer", "string") or "const" in schema or "enum" in schema
        )
        assert output.finish == "stop" or (output.finish == "length" and not bounded)  # a number's digits have no end
        if output.finish == "stop":
            jsonschema.validate(json.loads(output.text or ""), schema)
