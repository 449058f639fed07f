"""`/docs`: the OpenAPI document as one HTML page, without scripts and without external resources."""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: CanvasText; }
html { color-scheme: light dark; } h2 { margin-top: 2.5rem; } code { font-size: .9em; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .25rem .6rem; }
td { border-top: 1px solid color-mix(in srgb, CanvasText 20%, transparent); } .method { opacity: .6; }
"""
LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
    "minLength": "characters ≥",
    "maxLength": "characters ≤",
    "minItems": "items ≥",
    "maxItems": "items ≤",
    "maxProperties": "entries ≤",
}


def page(document: dict[str, Any]) -> str:
    """The OpenAPI document as HTML."""
    info = document["info"]
    return "".join(
        (
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])} API</title>",
            f"<meta name=viewport content='width=device-width'><style>{STYLE}</style>",
            f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
            "<p>OpenAPI document: <a href=/openapi.json>/openapi.json</a></p>",
            *(line for path, item in document["paths"].items() for line in _operations(path, item, document)),
            "</html>",
        )
    )


def _operations(path: str, item: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    for method, operation in item.items():
        yield f"<h2 id={escape(operation['operationId'])}><span class=method>{method.upper()}</span> "
        yield f"<code>{escape(path)}</code></h2><p>{escape(operation['summary'])}."
        yield f" {escape(operation.get('description', ''))}</p>"
        if parameters := operation.get("parameters"):
            yield _table((p["name"], p["required"], p["schema"], p.get("description", "")) for p in parameters)
        if "requestBody" in operation:
            ((kind, content),) = operation["requestBody"]["content"].items()
            if kind == "application/json":
                yield from _body(content["schema"], document)
            else:  # a form
                fields = content["schema"]["properties"].items()
                yield f"<h3>Body, {kind}</h3>" + _table((name, True, field, "") for name, field in fields)
        yield "<h3>Responses</h3><table>"
        for status, answer in operation["responses"].items():
            kinds = ", ".join(answer["content"])
            yield f"<tr><td>{escape(status)}<td>{escape(answer['description'])}<td><code>{escape(kinds)}</code>"
        yield "</table>"


def _body(schema: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    fields = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    required = fields.get("required", ())
    unsupported = {
        n for n, field in fields["properties"].items() if field.get("description", "").startswith("Not supported")
    }
    known = {name: field for name, field in fields["properties"].items() if name not in unsupported}
    yield "<h3>Body</h3>"
    yield _table((name, name in required, field, field.get("description", "")) for name, field in known.items())
    names = ", ".join(f"<code>{escape(name)}</code>" for name in sorted(unsupported))
    yield f"<details><summary>Unsupported fields</summary><p>{names}</p></details>"


def _table(rows: Any) -> str:
    found = ["<table><tr><th>field<th>type<th>"]
    for name, required, schema, description in rows:
        mark = " <b>required</b>" if required else ""
        kind = escape(_kind(schema))
        found.append(f"<tr><td><code>{escape(name)}</code>{mark}<td><code>{kind}</code><td>{escape(description)}")
    return "".join([*found, "</table>"])


def _kind(schema: dict[str, Any]) -> str:
    """A short type description with its limits; null, which every optional field accepts, is left out."""
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " | ".join(_kind(kind) for kind in schema["anyOf"] if kind.get("type") != "null")
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    limits = " ".join(f"{sign} {schema[name]}" for name, sign in LIMITS.items() if name in schema)
    kind = f"[{_kind(schema['items'])}]" if "items" in schema else str(schema.get("type", "any"))
    return f"{kind} {limits}".strip()
