"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from bagu.serve.http import fields
from bagu.serve.http.errors import ApiError
from bagu.serve.http.fields import refuse_unsupported
from bagu.serve.http.messages import Message, for_template
from bagu.serve.http.openai import MAX_TOP_LOGPROBS, Count, Generation, Job
from bagu.serve.http.texts import render, tokens_left
from bagu.serve.http.tool_fields import ToolFields, tool_form
from bagu.serve.http.worker import Ready
from bagu.serve.message.format import MessageFormat
from bagu.serve.message.parser import THINK
from bagu.serve.message.tool_grammar import tool_grammar

__all__ = ["ChatBody"]

TAIL = 8  # tokens at the end of a prompt that may contain the <think> of the generation prompt


class ChatBody(ToolFields, Generation):
    unsupported: ClassVar[fields.Fields] = fields.CHAT
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """Functions, the older name of tools, are accepted with function_call "none"."""
        sent = dict(self.model_extra or {})
        if sent.get("function_call") == "none":
            sent.pop("functions", None)
        refuse_unsupported(sent, self.unsupported)

    def to_job(self, ready: Ready) -> Job:
        self.check()
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs", hint='add "logprobs": true')
        tools = self.chosen_tools()
        prompt = self.prompt_ids(ready)
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        left = tokens_left([prompt], asked, ready.max_model_len, "messages")
        stops = {*(self.stop_token_ids or ()), *(() if self.ignore_eos else ready.turn_ends)}
        changes: dict[str, Any] = {}
        thinking = ready.thinks and ready.tokenizer.decode(prompt[-TAIL:]).rstrip().endswith(THINK)
        form = tool_form(ready) if self.offers_tools else None
        constrained = form is not None and (self.mode == "required" or any(tool.strict for tool in tools))
        if form is not None and constrained:
            changes["grammar"] = tool_grammar(
                form, tools, max_calls=self.max_calls, special_ids=ready.special_tokens,
                required=self.mode == "required", thinks=ready.thinks, thinking=thinking,
            )  # fmt: skip
        sampling = self.sampling(
            ready, max_tokens=min(left, ready.defaults.max_tokens or left) if asked is None else asked,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None, stop_token_ids=tuple(sorted(stops)),
            **changes,
        )  # fmt: skip
        job = self.job("chatcmpl", [prompt], sampling, None)
        if form is None and not ready.thinks:
            return job
        names = tuple(tool.name for tool in tools) if form else ()
        return job._replace(
            format=MessageFormat(
                form=form, names=names, live=constrained, max_calls=self.max_calls, thinks=ready.thinks,
                thinking=thinking,
            )
        )  # fmt: skip

    def prompt_ids(self, ready: Ready) -> list[int]:
        variables = dict(self.chat_template_kwargs or {})
        if self.offers_tools:
            variables["tools"] = self.definitions()
        return render(ready, for_template(self.messages, ready.tool_form), variables)
