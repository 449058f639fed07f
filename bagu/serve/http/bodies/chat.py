"""The body of `/v1/chat/completions`."""

from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from bagu.errors import ArgumentError
from bagu.serve.grammar import Grammar
from bagu.serve.http.bodies import fields
from bagu.serve.http.bodies.fields import refuse_unsupported
from bagu.serve.http.bodies.images import check_images, with_images
from bagu.serve.http.bodies.messages import Message, for_template, image_parts, without_images
from bagu.serve.http.bodies.openai import MAX_TOP_LOGPROBS, Count, Generation, Job
from bagu.serve.http.bodies.structured import grammar_of
from bagu.serve.http.bodies.texts import check_chat_length, render, tokens_left
from bagu.serve.http.bodies.tools import ToolFields, tool_form
from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.bodies import FileSearch
from bagu.serve.http.files_api.turn import Source, Turn, as_sent
from bagu.serve.images.prompt import PromptImage
from bagu.serve.message.format import MessageFormat
from bagu.serve.message.parser import THINK
from bagu.serve.message.tool_grammar import Tool, tool_grammar
from bagu.serve.wire.messages import Ready

TAIL = 8  # tokens at the end of a prompt that may contain the <think> of the generation prompt


class ChatBody(ToolFields, Generation):
    unsupported: ClassVar[fields.Fields] = fields.CHAT
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    file_search: FileSearch | None = None  # send the last question with passages of these stores
    metadata: dict[str, Any] | None = Field(None, description="accepted and not used: chat completions are not stored")
    store: bool | None = Field(
        None, description="accepted and not used: no chat completion is stored; POST /v1/responses stores its responses"
    )

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
        check_chat_length(ready, "messages", without_images(self.messages))
        check_chat_length(ready, "tools", self.tools)
        check_chat_length(ready, "chat_template_kwargs", self.chat_template_kwargs)
        tools = self.chosen_tools()
        if parts := image_parts(self.messages):
            check_images(parts, ready)
        prompt = self.prompt_ids(ready)
        images: tuple[PromptImage, ...] = ()
        if not prompt:
            raise ApiError(400, "the prompt is empty", param="messages", hint="the chat template writes nothing")
        if parts:
            prompt, images = with_images(prompt, parts, ready)
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        left = tokens_left([prompt], asked, ready.max_model_len, "messages")
        stops = {*(self.stop_token_ids or ()), *(() if self.ignore_eos else ready.turn_ends)}
        format, grammar = self._format(ready, prompt, tools)
        sampling = self.sampling(
            ready,
            max_tokens=min(left, ready.defaults.max_tokens or left) if asked is None else asked,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            stop_token_ids=tuple(sorted(stops)),
            **({} if grammar is None else {"grammar": grammar}),
        )
        job = self.job("chatcmpl", [prompt], sampling, None)
        return job._replace(format=format, requests=tuple(replace(r, images=images) for r in job.requests))

    def _format(
        self, ready: Ready, prompt: list[int], tools: list[Tool]
    ) -> tuple[MessageFormat | None, Grammar | None]:
        """How the message is parsed, None if it is only text; and the grammar of its calls, None if they are free."""
        thinking = ready.thinks and ready.tokenizer.decode(prompt[-TAIL:]).rstrip().endswith(THINK)
        format = MessageFormat(thinks=ready.thinks, thinking=thinking)
        if not self.offers_tools:
            return format if ready.thinks else None, None
        form, required = tool_form(ready), self.mode == "required"
        format = replace(format, form=form, names=tuple(tool.name for tool in tools), max_calls=self.max_calls)
        if self.structured_outputs is not None:  # it constrains the whole text, calls included
            if not required:
                return format, None
            hint = "leave structured_outputs out: the grammar of the call is made from the tools"
            raise ApiError(400, "structured_outputs excludes a required call", param="structured_outputs", hint=hint)
        content = None if required else grammar_of(self.response_format, None)
        if content is not None and form.trigger is None:
            hint = "leave one of them out, or require a call"
            message = "this model's calls are JSON without a marker, which response_format cannot tell from content"
            raise ApiError(400, message, param="response_format", hint=hint)
        if not (required or content is not None or any(tool.strict for tool in tools)):
            return format, None
        try:
            grammar = tool_grammar(
                form,
                tools,
                max_calls=self.max_calls,
                special_ids=ready.special_tokens,
                required=required,
                content=content,
                thinks=ready.thinks,
                thinking=thinking,
            )
        except ArgumentError as error:  # it is too large
            raise ApiError(400, str(error), param="tools", hint=error.hint) from error
        return replace(format, live=True, required=required), grammar

    @property
    def grammar_field(self) -> str:
        """The field that a refused grammar came from."""
        return "tools" if self.offers_tools and self.structured_outputs is None else super().grammar_field

    def prompt_ids(self, ready: Ready) -> list[int]:
        variables = dict(self.chat_template_kwargs or {})
        if self.offers_tools:
            variables["tools"] = self.definitions()
        messages = for_template(self.messages, ready.tool_form)
        as_sent(messages)
        return render(ready, messages, variables)

    def question(self) -> tuple[str, list[Source]]:
        """The last message, for which passages are searched, and the sources of earlier ones. Raises 400 if the user
        did not write it."""
        *before, last = [message.plain() for message in self.messages]
        if last["role"] != "user":
            hint = "the last message is the user's question"
            raise ApiError(400, f"file_search after a message of {last['role']!r:.40}", param="file_search", hint=hint)
        if image_parts(self.messages[-1:]):
            hint = "ask about the image without file_search"
            raise ApiError(400, "file_search for a question with an image", param="file_search", hint=hint)
        return str(last["content"]), as_sent(before)


class ChatWithPassages:
    """A chat whose last question is sent with passages."""

    def __init__(self, body: ChatBody, turn: Turn) -> None:
        self.body, self.turn = body, turn
        self.model, self.num_choices, self.grammar_field = body.model, body.num_choices, body.grammar_field

    def to_job(self, ready: Ready) -> Job:
        *before, last = self.body.messages
        sent = last.model_copy(update={"content": self.turn.message(ready.max_model_len)})
        return self.body.model_copy(update={"messages": [*before, sent]}).to_job(ready)
