"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from bagu.serve.http import fields
from bagu.serve.http.errors import ApiError
from bagu.serve.http.fields import refuse_unsupported
from bagu.serve.http.messages import Message
from bagu.serve.http.openai import MAX_TOP_LOGPROBS, Count, Generation, Job
from bagu.serve.http.texts import render, tokens_left
from bagu.serve.http.worker import Ready

__all__ = ["ChatBody"]


class ChatBody(Generation):
    unsupported: ClassVar[fields.Fields] = fields.CHAT
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """Tools are accepted with tool_choice "none"; the prompt does not contain them then."""
        sent = dict(self.model_extra or {})
        for choice, listed in (("tool_choice", "tools"), ("function_call", "functions")):
            if sent.get(choice) == "none":
                sent.pop(listed, None)
        refuse_unsupported(sent, self.unsupported)

    def to_job(self, ready: Ready) -> Job:
        self.check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs", hint='add "logprobs": true')
        prompt = self.prompt_ids(ready)
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        left = tokens_left([prompt], asked, ready.max_model_len, "messages")
        stops = {*(self.stop_token_ids or ()), *(() if self.ignore_eos else ready.turn_ends)}
        sampling = self.sampling(
            ready, max_tokens=min(left, ready.defaults.max_tokens or left) if asked is None else asked,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None, stop_token_ids=tuple(sorted(stops)),
        )  # fmt: skip
        return self.job("chatcmpl", [prompt], sampling, None)

    def prompt_ids(self, ready: Ready) -> list[int]:
        return render(ready, [m.plain() for m in self.messages], self.chat_template_kwargs or {})
