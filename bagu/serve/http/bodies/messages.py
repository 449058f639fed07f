"""The messages of a chat request, and what the chat template gets of them."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.bodies.parse import check_json
from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.bodies import Sources
from bagu.serve.message.forms import ToolForm


class TextPart(Body):
    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str | None = None  # a JSON object


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None  # of an assistant's message
    tool_call_id: str | None = None  # of the result of a call, with the role "tool"
    sources: Sources | None = None  # of an assistant's message: what its question was sent with

    def plain(self) -> dict[str, Any]:
        """The message as a dict for the template: text parts are joined, unknown fields are kept. A message that only
        calls tools has the content None, which templates distinguish from an empty text."""
        parts = self.content
        text = "\n".join(part.text for part in parts) if isinstance(parts, list) else parts
        if text is None and not self.tool_calls:
            text = ""
        given: dict[str, Any] = {"tool_call_id": self.tool_call_id} if self.tool_call_id is not None else {}
        if self.sources:
            given["sources"] = self.sources
        return {**(self.model_extra or {}), **given, "role": self.role, "content": text}


def for_template(messages: list[Message], form: ToolForm | None) -> list[dict[str, Any]]:
    """The messages as dicts. The arguments of earlier calls, which clients send as JSON text, become objects where the
    templates of this form expect them."""
    found = []
    for i, message in enumerate(messages):
        plain = message.plain()
        if message.tool_calls:
            as_text = form is not None and form.history == "text"
            plain["tool_calls"] = [
                _call(call, f"messages.{i}.tool_calls.{j}", as_text) for j, call in enumerate(message.tool_calls)
            ]
        found.append(plain)
    return found


def _call(call: ToolCall, place: str, as_text: bool) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    arguments = arguments_object(text, f"{place}.function.arguments")
    function = {"name": call.function.name, "arguments": text if as_text else arguments}
    return {**({} if call.id is None else {"id": call.id}), "type": "function", "function": function}


def arguments_object(text: str, param: str) -> dict[str, Any]:
    """The arguments of an earlier call. Raises 400 if they are not the text of a JSON object."""
    try:
        arguments = json.loads(check_json(text.encode()))
    except (ApiError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{param} is not the text of a JSON object: {text!r:.80}", param=param)
    return arguments
