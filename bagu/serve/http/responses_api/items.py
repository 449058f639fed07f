"""Input items of the Responses API, and the chat messages that they mean.

message               a message with text parts, of a user also with images
function_call         a call that the assistant made; calls in a row belong to one message
function_call_output  the result of a call
reasoning             the assistant's reasoning before its next message
file_search_call      a search for the question before it; with its results the question is written as it was sent
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bagu.serve.http.bodies.messages import arguments_object
from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.bodies import SentSource, Sources

TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
SOURCES: TypeAdapter[list[SentSource]] = TypeAdapter(Sources)
ROLES = ("user", "assistant", "system", "developer")
ITEMS = "message, function_call, function_call_output, file_search_call or reasoning"


def input_messages(given: str | Sequence[Any]) -> list[dict[str, Any]]:
    """The messages of `input`. Raises 400 with the item's number."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return _messages(given, "input")


def output_messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a response's output items, without a call that max_output_tokens cut."""
    kept = [i for i in items if (i["type"], i["status"]) != ("function_call", "incomplete")]
    return _messages([i for i in kept if i["type"] != "file_search_call"], "output")


def _messages(items: Sequence[Any], field: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    reasoning = ""
    for i, item in enumerate(items):
        place = f"{field}.{i}"
        if not isinstance(item, Mapping):
            raise ApiError(400, f"{place} is not an item", param=place, hint=f"an item is an object: {ITEMS}")
        kind = item.get("type", "message")
        if kind == "reasoning":
            reasoning += _text(item.get("content") or item.get("summary") or [], f"{place}.content")
            continue
        if kind == "file_search_call":
            if found and found[-1]["role"] == "user":
                found[-1]["sources"] = _sources(item.get("results"), f"{place}.results")
            continue
        if kind == "message":
            message = _message(item, place)
        elif kind == "function_call":
            message = _call(item, place)
        elif kind == "function_call_output":
            text = _text(item.get("output"), f"{place}.output")
            message = {"role": "tool", "tool_call_id": _string(item, "call_id", place), "content": text}
        else:
            param = f"{place}.type"
            raise ApiError(400, f"{param} is {kind!r:.40}, which is not supported", param=param, hint=f"use {ITEMS}")
        if message["role"] == "assistant" and reasoning:
            message["reasoning_content"], reasoning = reasoning, ""
        before: dict[str, Any] = found[-1] if found else {"role": None}
        if "tool_calls" in message and before["role"] == "assistant":  # one message has the text and all its calls
            before.setdefault("tool_calls", []).extend(message["tool_calls"])
        else:
            found.append(message)
    return found


def _sources(results: Any, place: str) -> list[SentSource]:
    try:
        return SOURCES.validate_python(results or [])
    except ValidationError as error:
        hint = "results as a response gave them, or none"
        raise ApiError(400, f"{place} is not a list of results", param=place, hint=hint) from error


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise ApiError(400, f"{place}.role is {role!r:.40}", param=f"{place}.role", hint=f"use {', '.join(ROLES)}")
    content = item.get("content")
    if role == "user" and isinstance(content, list) and any(_is_image(part) for part in content):
        return {"role": role, "content": [_part(part, f"{place}.content.{i}") for i, part in enumerate(content)]}
    return {"role": role, "content": _text(content, f"{place}.content")}


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _part(part: Any, place: str) -> dict[str, Any]:
    """A part of a message with images, as a chat request has it."""
    if not _is_image(part):
        return {"type": "text", "text": _text([part], place)}
    source = {name: part[name] for name in ("file_id", "detail") if part.get(name) is not None}
    if (url := part.get("image_url")) is not None:
        source["url"] = url
    if not all(isinstance(value, str) for value in source.values()) or not source.keys() & {"url", "file_id"}:
        hint = '"image_url": "data:image/png;base64,…", or "file_id"'
        raise ApiError(400, f"{place} has no image", param=place, hint=hint)
    return {"type": "image_url", "image_url": source}


def _call(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = {"name": _string(item, "name", place), "arguments": _string(item, "arguments", place)}
    arguments_object(function["arguments"], f"{place}.arguments")
    call = {"id": _string(item, "call_id", place), "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _string(item: Mapping[str, Any], key: str, place: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise ApiError(400, f"{place}.{key} is {value!r:.40}", param=f"{place}.{key}", hint="it is a string")
    return value


def _text(content: Any, place: str) -> str:
    """A text, or the joined texts of its parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{place} is {content!r:.40}", param=place, hint="a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        valid = isinstance(part, Mapping) and part.get("type") in TEXTS and isinstance(part.get("text"), str)
        if not valid:
            param = f"{place}.{i}"
            raise ApiError(
                400, f"{param} is not a text part", param=param, hint=f"its type is one of {', '.join(TEXTS)}"
            )
        texts.append(part["text"])
    return "\n".join(texts)
