"""Parsing of request bodies: JSON to a validated body, or a 400 with the field and the reason.

What a body may cost is decided here, before Python objects are made of it: 8 MB of `[],` are 2.8 million lists, which
take 180 MB and 0.4 s, and a list of as many messages takes gigabytes.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.errors import ApiError
from bagu.serve.unicode import lone_escape

B = TypeVar("B", bound=Body)
MAX_DEPTH = 128  # of nested objects and lists. Python's own limit differs by version and by the calls on the stack
MAX_PARTS = 2**15  # objects and lists: 16,000 messages of one text part each
MAX_VALUES = 2**19  # of all lists and objects: a prompt of as many token ids
MAX_KEYS = 2**16  # of all objects: as many different keys take 0.1 s, and as much again where they are echoed
MAX_FLOATS = 2**16  # numbers with a fraction or an exponent: each calls Python, 0.2 s for half a million


def parse(kind: type[B], raw: bytes) -> B:
    """Parse and validate a body. Raises 400 with the field and the reason."""
    text = check_json(raw)
    try:
        data = json.loads(text, parse_constant=_no_constant, parse_float=_numbers())
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if _parts(raw) > MAX_DEPTH:  # a quick bound: most bodies need no further check
        _check_depth(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        field = errors[0]["loc"][:1]  # of a union, the member that was read furthest says what is wrong
        first = max((e for e in errors if e["loc"][:1] == field), key=lambda e: len(e["loc"]))
        loc = first["loc"]
        known = kind.model_fields.get(str(loc[0])) if loc else None
        if first["type"] != "missing" and known is not None and known.description:  # a union: no member matches
            message = f"{loc[0]} is {known.description}; {_short(data[loc[0]])} was sent"
            raise ApiError(400, message, param=str(loc[0])) from error
        where = _place(loc, data) or None
        found = "" if first["type"] == "missing" else f"; {_short(first['input'])} was sent"
        raise ApiError(400, f"{where or 'the body'}: {first['msg']}{found}", param=where) from error


def _parts(raw: bytes) -> int:
    return raw.count(b"[") + raw.count(b"{")


def _check_size(raw: bytes) -> None:
    """Raise 400 for a body of too many values. The text of its strings is left out only if that decides: 8 MB take 50
    ms, where a regular expression over millions of strings takes 1.5 s."""
    if _parts(raw) <= MAX_PARTS and raw.count(b",") <= MAX_VALUES and raw.count(b":") <= MAX_KEYS:
        return
    import numpy as np  # here: the HTTP process starts without it

    signs = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    quotes = np.cumsum(signs == ord('"'), dtype=np.uint8)  # modulo 256: odd inside of a string
    bare = signs[quotes % 2 == 0].tobytes()
    for what, count, most in (
        ("objects and lists", _parts(bare), MAX_PARTS),
        ("values", bare.count(b","), MAX_VALUES),
        ("keys", bare.count(b":"), MAX_KEYS),
    ):
        if count > most:
            raise ApiError(400, f"the body has {count} {what}", hint=f"at most {most}")


def check_json(raw: bytes) -> str:
    """The text of a JSON document that may be parsed. Raises 400 if it has too many values, or is not UTF-8: json.loads
    of bytes would also read UTF-16 and UTF-32, and surrogates, which no response could contain."""
    _check_size(raw)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 text: {error.reason} at {error.start}") from error
    if (place := lone_escape(text)) is not None:
        raise ApiError(400, f"the body is not UTF-8 text: a surrogate without its pair at {place}")
    return text


def _check_depth(data: Any) -> None:
    level, depth = [data], 0
    while level := [child for value in level for child in _members(value) if isinstance(child, (dict, list))]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise _too_deep()


def _members(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested too deeply: more than {MAX_DEPTH} objects and lists in each other")


def _place(loc: tuple[int | str, ...], data: Any) -> str:
    """The path of a field, e.g. tools.0.function.name. pydantic's path also has the members of unions, which are not
    keys of the data."""
    parts = []
    for part in loc:
        if (isinstance(data, dict) and part in data) or (isinstance(data, list) and isinstance(part, int)):
            data = data[part]  # type: ignore[index]
        elif part is not loc[-1] or not isinstance(data, dict):  # a missing key is the last part
            continue
        parts.append(str(part)[:80])
    return ".".join(parts)


def _numbers() -> Callable[[str], float | int]:
    """What json.loads calls for each number with a fraction or an exponent of one body. JSON has one number type: 16.0
    is an integer, as in JSON Schema and other servers."""
    left = MAX_FLOATS

    def number(text: str) -> float | int:
        nonlocal left
        left -= 1
        if left < 0:
            raise ApiError(400, f"the body has more than {MAX_FLOATS} numbers with a fraction or an exponent")
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text:.40} is too large for a number")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value

    return number


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _short(value: Any) -> str:
    """The value in at most 80 characters. `reprlib` does not format the rest, which took 0.2 s for a body of 6 MB."""
    brief = reprlib.Repr()
    brief.maxstring = 80
    text = brief.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
