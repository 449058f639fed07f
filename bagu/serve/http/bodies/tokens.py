"""The bodies of `/tokenize` and `/detokenize`."""

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from bagu.serve.http.bodies import fields
from bagu.serve.http.bodies.images import check_images
from bagu.serve.http.bodies.messages import Message, for_template, image_parts, without_images
from bagu.serve.http.bodies.openai import Body, ModelName, TokenId
from bagu.serve.http.bodies.texts import SHORT, check_chat_length, check_tokens, encode, render
from bagu.serve.http.errors import ApiError
from bagu.serve.wire.messages import Ready


def _given(one: str, other: str) -> dict[str, Any]:
    """The schema of a body with `one` and without `other`; null counts as missing."""
    return {"required": [one], "properties": {one: {"not": {"type": "null"}}, other: {"type": "null"}}}


class TokenizeBody(Body):
    """A text, or messages for the chat template."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [_given("prompt", "messages"), _given("messages", "prompt")]})
    unsupported: ClassVar[fields.Fields] = fields.TOKENIZE
    model: ModelName | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_special_tokens: bool | None = None  # only for a prompt; the chat template adds its own

    def ids(self, ready: Ready) -> list[int]:
        self.refuse_unsupported()
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(400, "send either prompt or messages", param="prompt")
        if self.prompt is not None:
            return encode(self.prompt, ready, "prompt", add_special_tokens=self.add_special_tokens is not False)
        if self.add_special_tokens:
            hint = "leave it out: the chat template adds special tokens"
            raise ApiError(400, "add_special_tokens needs a prompt", param="add_special_tokens", hint=hint)
        messages = self.messages or []
        check_chat_length(ready, "messages", without_images(messages))
        parts = image_parts(messages)
        spec = check_images(parts, ready) if parts else None
        ids = render(ready, for_template(messages, ready.tool_form), {})
        if spec is None:
            return ids
        return [id for id in ids for _ in range(spec.tokens if id == spec.token else 1)]


class DetokenizeBody(Body):
    unsupported: ClassVar[fields.Fields] = fields.DETOKENIZE
    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]

    def text(self, ready: Ready) -> str:
        self.refuse_unsupported()
        most = max(SHORT, ready.max_model_len)
        if len(self.tokens) > most:
            hint = f"at most {most}; this model's longest sequence is {ready.max_model_len}"
            raise ApiError(400, f"{len(self.tokens)} tokens", param="tokens", code="context_length_exceeded", hint=hint)
        check_tokens(self.tokens, ready, "tokens")
        return ready.tokenizer.decode(self.tokens)
