"""The messages of a chat request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from bagu.serve.http.openai import Body

__all__ = ["Message"]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: str
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None

    def plain(self) -> dict[str, Any]:
        """The message as a dict for the template: text parts are joined, unknown fields are kept."""
        parts = self.content
        text = "\n".join(part.text for part in parts) if isinstance(parts, list) else parts or ""
        return {**(self.model_extra or {}), "role": self.role, "content": text}
