"""The messages of a chat request, and what the chat template gets of them."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from bagu.serve.http.bodies.images import ImagePart
from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.bodies.parse import check_json
from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.bodies import Sources
from bagu.serve.message.forms import ToolForm

MAX_IMAGES = 64  # of a request; the context of the model usually allows fewer


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
    content: (
        str
        | Annotated[list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(fail_fast=True)]
        | None
    ) = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None  # of an assistant's message
    tool_call_id: str | None = None  # of the result of a call, with the role "tool"
    sources: Sources | None = None  # of an assistant's message: what its question was sent with

    def plain(self) -> dict[str, Any]:
        """The message as a dict for the template: text parts are joined, unknown fields are kept. A message that only
        calls tools has the content None, which templates distinguish from an empty text. With images, the content is a
        list of parts, in which an image has no data."""
        parts = self.content
        text: str | list[dict[str, str]] | None
        if not isinstance(parts, list):
            text = parts
        elif any(isinstance(part, ImagePart) for part in parts):
            text = [{"type": "text", "text": p.text} if isinstance(p, TextPart) else {"type": "image"} for p in parts]
        else:
            text = "\n".join(part.text for part in parts if isinstance(part, TextPart))
        if text is None and not self.tool_calls:
            text = ""
        given: dict[str, Any] = {"tool_call_id": self.tool_call_id} if self.tool_call_id is not None else {}
        if self.sources:
            given["sources"] = self.sources
        return {**(self.model_extra or {}), **given, "role": self.role, "content": text}


def image_parts(messages: list[Message]) -> list[tuple[str, ImagePart]]:
    """The images of all messages in order, with their places in the body. Raises 400 for one that is not a user's, and
    for too many."""
    found: list[tuple[str, ImagePart]] = []
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if not isinstance(part, ImagePart):
                continue
            place = f"messages.{i}.content.{j}"
            if message.role != "user":
                hint = "send images in messages of the user"
                raise ApiError(400, f"{place} is an image of {message.role!r:.40}", param=place, hint=hint)
            found.append((place, part))
            if len(found) > MAX_IMAGES:
                raise ApiError(400, f"more than {MAX_IMAGES} images", param=place, hint="send fewer")
    return found


def without_images(messages: list[Message]) -> list[Message]:
    """The messages as text alone, whose length is checked."""
    return [
        m.model_copy(update={"content": [p for p in m.content if isinstance(p, TextPart)]})
        if isinstance(m.content, list)
        else m
        for m in messages
    ]


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
