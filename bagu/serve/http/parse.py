"""Parsing of request bodies: JSON to a validated body, or a 400 with the field and the reason."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError

from bagu.serve.http.errors import ApiError
from bagu.serve.http.openai import Body

__all__ = ["parse"]

B = TypeVar("B", bound=Body)
MAX_DEPTH = 128  # of nested objects and lists. Python's own limit differs by version and by the calls on the stack


def parse(kind: type[B], raw: bytes) -> B:
    """Parse and validate a body. Raises 400 with the field and the reason."""
    try:
        data = json.loads(raw, parse_constant=_no_constant, parse_float=_number)
        if b"\\u" in raw:  # encoding fails for an unpaired surrogate, which no response could contain
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError as error:
        raise _too_deep() from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ApiError(400, f"the body is not UTF-8 text: {error.reason} at {error.start}") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:  # a quick bound: most bodies need no further check
        _check_depth(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        loc = first["loc"]
        known = kind.model_fields.get(str(loc[0])) if loc else None
        if first["type"] != "missing" and known is not None and known.description:  # a union: no member matches
            message = f"{loc[0]} is {known.description}; {_short(data[loc[0]])} was sent"
            raise ApiError(400, message, param=str(loc[0])) from error
        where = _place(loc, data) or None
        found = "" if first["type"] == "missing" else f"; {_short(first['input'])} was sent"
        raise ApiError(400, f"{where or 'the body'}: {first['msg']}{found}", param=where) from error


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
        parts.append(str(part))
    return ".".join(parts)


def _number(text: str) -> float | int:
    """JSON has one number type: 16.0 is an integer, as in JSON Schema and other servers."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _short(value: Any) -> str:
    """The value in at most 80 characters. `reprlib` does not format the rest, which took 0.2 s for a body of 6 MB."""
    brief = reprlib.Repr()
    brief.maxstring = 80
    text = brief.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
