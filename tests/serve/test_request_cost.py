"""What a request may cost the server's process before it is admitted or refused: every field at the limit of a body."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from api_client import CHAT, post
from tiny_server import KEY, Running, running_server

from bagu.serve import http
from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.bodies.parse import MAX_FLOATS, MAX_KEYS, MAX_PARTS, MAX_VALUES
from bagu.serve.http.calls import MAX_BODY

MAX_CPU_S, MAX_RSS = 0.3, 100 * 2**20
ROOM = MAX_BODY - 2**12  # bytes of a value, beside the rest of its body
HOLE = "@"  # where the value goes
Fill = Callable[[Any], Any]  # a value to the body that has it in one place


def shapes() -> dict[str, bytes]:
    """Values that a field may get, of any type: at the limit of a body, or at the limits of what is parsed."""

    def listed(item: bytes, most: int) -> bytes:
        return b"[" + b",".join([item] * min(most - 64, ROOM // (len(item) + 1))) + b"]"

    words = b"hello world, " * (ROOM // 13)
    keys = b",".join(b'"%x":1' % i for i in range(MAX_KEYS - 64))
    arguments = json.dumps('{"a": [' + "[]," * (ROOM // 4) + "0]}").encode()
    return {
        "text": b'"' + b"a" * ROOM + b'"',
        "words": b'"' + words + b'"',
        "escapes": b'"' + b"\\u4f60" * (ROOM // 6) + b'"',
        "emoji": b'"' + b"\\ud83d\\ude42" * (ROOM // 12) + b'"',
        "json": arguments,
        "numbers": listed(b"257", MAX_VALUES),
        "floats": listed(b"1.5", MAX_FLOATS),
        "more floats": listed(b"1e5", MAX_VALUES),
        "strings": listed(b'"ab"', MAX_VALUES),
        "lists": listed(b"[]", 2**40),
        "texts": listed(b'"' + words[:30_000] + b'"', 2**40),
        "nested": listed(b"[1]", MAX_PARTS),
        "objects": listed(b'{"type":"text","text":"a"}', MAX_PARTS),
        "keys": b"{" + keys + b"}",
        "key": b'{"' + b"a" * ROOM + b'": 1}',
    }


def smallest(schema: Any, defs: Any) -> Any:
    """A small instance of a schema of /openapi.json."""
    schema = defs[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    if options := schema.get("anyOf"):
        return smallest(options[0], defs)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object":
            required = schema.get("required", [])
            found = {name: smallest(schema["properties"][name], defs) for name in required}
            return {**found, **({"role": "user"} if "role" in found else {})}  # that the template knows
        case "array":
            return [smallest(schema.get("items", {}), defs)] * schema.get("minItems", 0)
        case "integer" | "number":
            return max(1, schema.get("minimum", 1))
        case "boolean":
            return True
        case _:
            return "a"


def _put(fill: Fill, base: Any, name: str, value: Any) -> Any:
    return fill({**base, name: value})


def places(schema: Any, defs: Any, fill: Fill, path: str) -> Iterator[tuple[str, Fill]]:
    """Every place of a body, its fields and the items of its lists, with the function that puts a value there."""
    yield path, fill
    schema = defs[schema["$ref"].rsplit("/", 1)[1]] if "$ref" in schema else schema
    found: dict[str, Fill] = {}
    for option in schema.get("anyOf", [schema]):
        option = defs[option["$ref"].rsplit("/", 1)[1]] if "$ref" in option else option
        small = smallest(option, defs)
        for name, part in option.get("properties", {}).items():
            if not part.get("x-unsupported"):
                found.update(places(part, defs, partial(_put, fill, small, name), f"{path}.{name}"))
        if option.get("type") == "array" and option.get("items"):
            found.update(places(option["items"], defs, lambda value: fill([value]), f"{path}[]"))
    yield from found.items()


def operations(server: Running) -> Iterator[tuple[str, str, Fill]]:
    """(route, place in its body, fill) of every operation with a JSON body."""
    described = server.get("/openapi.json")
    defs = described["components"]["schemas"]
    for route, methods in described["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" in content:  # a form with a file has tests of its own
            schema = content["application/json"]["schema"]
            for path, fill in places(schema, defs, lambda value: value, ""):
                yield route, path.removeprefix("."), fill


class Meter:
    """CPU seconds of a process, and its largest resident memory."""

    def __init__(self, pid: int) -> None:
        self.folder = Path(f"/proc/{pid}")

    def status(self, name: str) -> int:
        lines = (self.folder / "status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))

    def cpu_s(self) -> float:
        fields = (self.folder / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def reset_peak(self) -> None:
        (self.folder / "clear_refs").write_text("5")


def spend(server: Running, chosen: Callable[[str, str, str], bool]) -> list[str]:
    """Send every chosen (route, place, shape); returns those that cost too much, or got no answer below 500."""
    post(server, CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})
    meter, faults, values = Meter(server.process.pid), [], shapes()
    start = meter.status("VmRSS")
    for route, path, fill in operations(server):
        hole = json.dumps(fill(HOLE)).encode()
        for shape, value in values.items():
            if not chosen(route, path, shape):
                continue
            body = hole.replace(json.dumps(HOLE).encode(), value, 1)
            for _ in range(3):  # CPU time rises by a quarter beside other tests: the cheapest of three decides
                meter.reset_peak()
                before, memory = meter.cpu_s(), meter.status("VmRSS")
                answer = post(server, route, body)
                cost, peak = meter.cpu_s() - before, meter.status("VmHWM") - memory
                if not (over := cost > MAX_CPU_S or peak > MAX_RSS or answer.status_code >= 500):
                    break
            if over:
                faults.append(f"{route} {path} {shape}: {answer.status_code}, {cost:.2f} s, {peak / 2**20:.0f} MB")
    grown = meter.status("VmRSS") - start
    return [*faults, *([f"{grown / 2**20:.0f} MB stay"] if grown > MAX_RSS else [])]


CHOSEN = {"messages[].content", "messages[].tool_calls[].function.arguments", "tools[].function.parameters", "stop"}


def test_the_text_of_a_chat_costs_little_before_it_is_refused(tiny: Running) -> None:
    """4 MB of arguments took 8 s and 1.3 GB: they were parsed, rendered and tokenized before their length was known."""
    assert spend(tiny, lambda route, path, shape: route == CHAT and path in CHOSEN) == []


def _lists(schema: Any, path: str) -> Iterator[str]:
    """The lists of a pydantic schema that collect an error for every wrong item."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and not schema.get("fail_fast"):
            yield path
        for name, part in schema.items():
            yield from _lists(part, path if name in ("schema", "fields", "choices") else f"{path}.{name}")
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _lists(part, path)


def _bodies(base: type[Body]) -> Iterator[type[Body]]:
    for body in base.__subclasses__():
        yield from (body, *_bodies(body))


def test_every_list_of_a_body_ends_at_its_first_wrong_item() -> None:
    """A list of a million wrong values made a million errors: `include` of a response took 2 s and 509 MB."""
    for module in pkgutil.walk_packages(http.__path__, f"{http.__name__}."):
        importlib.import_module(module.name)
    assert len(set(_bodies(Body))) > 20
    assert sorted({p for body in _bodies(Body) for p in _lists(body.__pydantic_core_schema__, body.__name__)}) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generator", "encoder"])
def test_every_field_at_the_limit_of_a_body_costs_little(tmp_path: Path, kind: str) -> None:
    flags = ("--api-key", KEY, "--kind", kind)
    with running_server(tmp_path / "log", *flags, fork=False) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        assert spend(server, lambda route, path, shape: True) == []
