"""Schemas with and without a finite instance."""

from __future__ import annotations

from typing import Any

import pytest

from bagu.serve.constrain.finite import has_finite_instance

LIST = {"type": "object", "properties": {"next": {"$ref": "#"}, "value": {"type": "integer"}}}
FINITE: list[Any] = [
    True, {}, LIST, {**LIST, "required": ["value"]}, {"type": "array", "items": {"$ref": "#"}},
    {**LIST, "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["next"]},
    {"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
               "b": {"type": ["string", "object"], "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}},
     "$ref": "#/$defs/a"},
    {"$ref": "https://example.com/schema"}, {"$ref": "#/missing"}, {"$ref": "#anchor"},
    {"type": "array", "prefixItems": [{"type": "integer"}], "items": {"$ref": "#"}, "minItems": 1},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "const": {"a": 1}},
]  # fmt: skip
ENDLESS: list[Any] = [
    {"$ref": "#"}, {**LIST, "required": ["next"]}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    {"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
               "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 2}}, "$ref": "#/$defs/b"},
    {"allOf": [{"type": "object"}, {**LIST, "required": ["next"]}]},
    {"anyOf": [{**LIST, "required": ["next"]}, {"$ref": "#"}]},
    {"type": "object", "additionalProperties": {"$ref": "#"}, "required": ["any"]},
    {"type": "object", "properties": {"a/b": {"$ref": "#/properties/a~1b"}}, "required": ["a/b"]},
]  # fmt: skip


@pytest.mark.parametrize("schema", FINITE, ids=range(len(FINITE)))
def test_a_schema_with_a_finite_instance(schema: Any) -> None:
    assert has_finite_instance(schema)


@pytest.mark.parametrize("schema", ENDLESS, ids=range(len(ENDLESS)))
def test_a_schema_without_a_finite_instance(schema: Any) -> None:
    assert not has_finite_instance(schema)
