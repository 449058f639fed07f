"""A check of JSON Schemas: the errors that would otherwise appear only when a grammar is made from them."""

from collections.abc import Iterator, Mapping
from typing import Any

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")  # keys whose values are schemas by name
SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
MAX_DEPTH = 64


def schema_error(schema: Any) -> str | None:
    """What is wrong with a schema: its place and the error; None if nothing is."""
    return next(_errors(schema, schema, "", 0), None)


def _errors(schema: Any, root: Any, place: str, depth: int) -> Iterator[str]:
    where = f"{place}: " if place else ""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        yield f"{where}a schema is an object or a boolean"
        return
    if depth > MAX_DEPTH:
        yield f"{where}more than {MAX_DEPTH} levels"
        return
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in TYPES:
            yield f"{where}type {kind!r:.40} is not one of {', '.join(TYPES)}"
    if "enum" in schema and not (isinstance(schema["enum"], list) and schema["enum"]):
        yield f"{where}enum is not a list of values"
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        yield f"{where}required is not a list of names"
    if "$ref" in schema and not _resolves(schema["$ref"], root):
        yield f"{where}$ref {schema['$ref']!r:.80} is not in this schema"
    for path, inner in _inner(schema, where):
        if isinstance(inner, str):
            yield inner
        else:
            yield from _errors(inner[0], root, f"{place}.{path}".lstrip("."), depth + 1)


def _inner(schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, str | tuple[Any]]]:
    """(path, 1-tuple with the schema there) for each schema inside, or (path, error)."""
    for key in MAPPINGS:
        if key in schema and not isinstance(schema[key], Mapping):
            yield key, f"{where}{key} is not an object"
        for name, value in schema[key].items() if isinstance(schema.get(key), Mapping) else ():
            yield f"{key}.{name}", (value,)
    for key in LISTS:
        if key in schema and not isinstance(schema[key], list):
            yield key, f"{where}{key} is not a list of schemas"
        for i, value in enumerate(schema[key]) if isinstance(schema.get(key), list) else ():
            yield f"{key}.{i}", (value,)
    for key in SCHEMAS:
        if key in schema and not (key == "items" and isinstance(schema[key], list)):
            yield key, (schema[key],)


def _resolves(reference: Any, root: Any) -> bool:
    """Whether a reference such as #/$defs/Item exists in `root`."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return False
    node = root
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, Mapping) and key in node:
            node = node[key]
        else:
            return False
    return True
