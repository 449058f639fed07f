"""A JSON value read character by character: `Malformed` is raised at the first character that is not JSON."""

import re
from collections.abc import Callable

from bagu.serve.message.reader import Malformed, Reader, Steps

SPACE = re.compile(r"[ \t\r\n]*")
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR = re.compile(r"[-+.0-9a-zA-Z]*")
VALID_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
HEX = "0123456789abcdefABCDEF"
MAX_DEPTH = 64  # of nested objects and lists; clients' JSON parsers fail at about a thousand

Member = Callable[[str, int], Steps[None]]  # reads the value of a key, at a depth


def json_value(reader: Reader, depth: int = 0) -> Steps[None]:
    first = yield from reader.peek()
    if first == "{":
        yield from json_object(reader, lambda _, inner: json_value(reader, inner), depth)
    elif first == "[":
        yield from _json_list(reader, depth)
    elif first == '"':
        yield from json_string(reader)
    elif not VALID_SCALAR.fullmatch((yield from reader.run(SCALAR))):
        raise Malformed


def json_object(reader: Reader, member: Member, depth: int = 0) -> Steps[None]:
    """Read an object; `member` reads the value of each key."""
    _check_depth(depth)
    yield from reader.expect("{")
    yield from reader.run(SPACE)
    if (yield from reader.literal("}")):
        return
    while True:
        key = yield from json_string(reader)
        yield from reader.run(SPACE)
        yield from reader.expect(":")
        yield from reader.run(SPACE)
        yield from member(key, depth + 1)
        yield from reader.run(SPACE)
        if (yield from reader.expect(",", "}")) == "}":
            return
        yield from reader.run(SPACE)


def _json_list(reader: Reader, depth: int) -> Steps[None]:
    _check_depth(depth)
    yield from reader.expect("[")
    yield from reader.run(SPACE)
    if (yield from reader.literal("]")):
        return
    while True:
        yield from json_value(reader, depth + 1)
        yield from reader.run(SPACE)
        if (yield from reader.expect(",", "]")) == "]":
            return
        yield from reader.run(SPACE)


def json_string(reader: Reader) -> Steps[str]:
    """Read a string; returns its text between the quotes, with its escapes."""
    yield from reader.expect('"')
    parts = []
    while True:
        parts.append((yield from reader.run(PLAIN)))
        if (yield from reader.expect('"', "\\")) == '"':
            return "".join(parts)
        escaped = yield from reader.expect(*'"\\/bfnrtu')
        digits = ""
        if escaped == "u":
            for _ in range(4):
                digits += yield from reader.expect(*HEX)
        parts.append(f"\\{escaped}{digits}")


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise Malformed
