"""Whether a JSON Schema has a finite instance, or recurses without end.

llguidance compiles `{"properties": {"next": {"$ref": "#"}}, "required": ["next"], "type": "object"}`, and a model then
writes until max_tokens. This check refuses such a schema. It is the least fixed point of "some finite value satisfies
this", over the keywords that make a value contain others; all other keywords count as satisfiable, so that only schemas
without a finite instance are refused.
"""

from typing import Any
from urllib.parse import unquote


def has_finite_instance(schema: Any) -> bool:
    """False if every value that satisfies the schema would be infinite. Raises RecursionError for a deep schema."""
    finite: dict[str, bool] = {}  # by $ref, so far
    while True:
        seen: dict[str, bool] = {}
        result = _finite(schema, schema, finite, seen)
        new = {ref for ref, ok in seen.items() if ok and not finite.get(ref)}
        if result or not new:
            return result
        finite.update(dict.fromkeys(new, True))


def _finite(schema: Any, root: Any, finite: dict[str, bool], seen: dict[str, bool]) -> bool:
    """Whether the schema has a finite instance, given that the references in `finite` have one. `seen` gets the same
    of each reference."""
    if not isinstance(schema, dict):
        return True
    ref = schema.get("$ref")
    if isinstance(ref, str) and not _reference(ref, root, finite, seen):
        return False
    if not all(_finite(s, root, finite, seen) for s in _list(schema.get("allOf"))):
        return False
    for name in ("anyOf", "oneOf"):
        options = [_finite(s, root, finite, seen) for s in _list(schema.get(name))]
        if options and not any(options):
            return False
    types = schema.get("type")
    allowed = {types} if isinstance(types, str) else set(map(str, _list(types)))
    if not allowed or allowed - {"object", "array"} or "const" in schema or "enum" in schema:
        return True
    objects = "object" in allowed and all(
        _finite(_property(schema, name), root, finite, seen) for name in _list(schema.get("required"))
    )
    return objects or ("array" in allowed and all(_finite(s, root, finite, seen) for s in _items(schema)))


def _reference(ref: str, root: Any, finite: dict[str, bool], seen: dict[str, bool]) -> bool:
    if finite.get(ref):
        return True
    if ref not in seen:
        seen[ref] = False  # until it is known: a reference to itself alone has no finite instance
        seen[ref] = _finite(_resolve(ref, root), root, finite, seen)
    return seen[ref]


def _resolve(ref: str, root: Any) -> Any:
    """The schema at a JSON pointer of this document; True for references that only the compiler resolves."""
    if ref != "#" and not ref.startswith("#/"):
        return True
    found = root
    for part in ref.split("/")[1:]:
        key = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isdigit() and int(key) < len(found):
            found = found[int(key)]
        else:
            return True
    return found


def _property(schema: dict[str, Any], name: Any) -> Any:
    listed = schema.get("properties")
    if isinstance(listed, dict) and name in listed:
        return listed[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


def _items(schema: dict[str, Any]) -> list[Any]:
    """The schemas of the items that an array must have."""
    least = schema.get("minItems", 0)
    first = _list(schema.get("prefixItems", schema.get("items")))
    others = schema.get("additionalItems") if isinstance(schema.get("items"), list) else schema.get("items")
    if not isinstance(least, int) or least <= len(first):
        return first[: least if isinstance(least, int) else 0]
    return [*first, others]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
