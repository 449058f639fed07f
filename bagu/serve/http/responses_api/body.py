"""The body of `POST /v1/responses`, and the chat request that it means."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationError

from bagu.serve.http.bodies import fields
from bagu.serve.http.bodies.chat import ChatBody, ChatWithPassages
from bagu.serve.http.bodies.openai import Body, Count, Job, Sampled, Word
from bagu.serve.http.bodies.tools import MAX_TOOLS, ToolName
from bagu.serve.http.errors import ApiError
from bagu.serve.http.files_api.bodies import FileSearchChoice, FileSearchTool
from bagu.serve.http.files_api.turn import Turn
from bagu.serve.wire.messages import Ready

# fields of the chat request -> fields of this body, for the `param` of an error
NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
SHARED = (
    *(f for f in Sampled.model_fields if f != "structured_outputs"),
    "chat_template_kwargs",
    "parallel_tool_calls",
)

# OpenAI's limits. A stored response keeps them.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


AnyTool = Annotated[FunctionTool | FileSearchTool, Field(discriminator="type")]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]


class TextOptions(Body):
    format: TextFormat | None = None

    def echo(self) -> dict[str, Any]:
        """What a response says of them: nothing that has no effect, since a stored response would keep it."""
        if self.format is None or self.format.type != "json_schema":
            return {"format": {"type": "text" if self.format is None else self.format.type}}
        return {"format": self.format.model_dump(mode="json", exclude_unset=True)}


Included = Literal["file_search_call.results", "reasoning.encrypted_content"]


class ResponsesBody(Sampled):
    unsupported: ClassVar[fields.Fields] = fields.RESPONSES
    input: Annotated[
        Word | Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1)],
        Field(description="a text, or a list of items: messages, function calls, their outputs, reasoning"),
    ]
    instructions: str | None = None  # a system message before the conversation; not carried to later responses
    previous_response_id: str | None = None
    store: bool | None = None  # keep the response in memory; None: yes
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedFunction | FileSearchChoice | None,
        Field(description='"none", "auto", "required", {"type": "function", "name": ...}, or {"type": "file_search"}'),
    ] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    max_output_tokens: Annotated[Count, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Metadata | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None

    @property
    def file_search(self) -> FileSearchTool | None:
        """The tool that is used: a search needs no call by the model, and is made unless `tool_choice` excludes it."""
        found = [tool for tool in self.tools or () if isinstance(tool, FileSearchTool)]
        if len(found) > 1:
            raise ApiError(400, "two tools are file_search", param="tools", hint="one may name several stores")
        if isinstance(self.tool_choice, FileSearchChoice) and not found:
            raise ApiError(400, "tool_choice needs the tool file_search", param="tool_choice", hint="add it to tools")
        excluded = self.tool_choice == "none" or isinstance(self.tool_choice, NamedFunction)
        return found[0] if found and not excluded else None

    def to_chat(self, messages: list[dict[str, Any]], turn: Turn | None = None) -> ResponsesChat:
        """The chat request, where `messages` are those of the previous response and of `input`."""
        self.refuse_unsupported()
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        chat: dict[str, Any] = {name: getattr(self, name) for name in SHARED}
        chat |= {"messages": [*system, *messages], "max_completion_tokens": self.max_output_tokens}
        functions = [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]
        if functions:
            chat["tools"] = [_nested(tool.model_dump(exclude_unset=True)) for tool in functions]
        choice = self.tool_choice
        if isinstance(choice, FileSearchChoice):
            choice = "none"  # the search is made, and no function is called
        elif turn is not None and choice == "required" and not functions:
            choice = None
        if isinstance(choice, NamedFunction):
            chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        else:
            chat["tool_choice"] = choice
        if self.text is not None and self.text.format is not None and self.text.format.type != "text":
            chat["response_format"] = _response_format(self.text.format)
        if self.structured_outputs is not None:
            chat["structured_outputs"] = self.structured_outputs.model_dump(exclude_unset=True, by_alias=True)
        try:
            return ResponsesChat(body=ChatBody.model_validate(chat), messages=messages, turn=turn)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            place = _renamed(".".join(map(str, first["loc"][:3])))
            raise ApiError(400, f"{place}: {first['msg']}", param=place) from error


class ResponsesChat:
    """A chat request made from a body of the Responses API; errors name the fields of that body."""

    def __init__(self, *, body: ChatBody, messages: list[dict[str, Any]], turn: Turn | None = None) -> None:
        self.body, self.messages, self.turn = body, messages, turn
        self.model, self.num_choices = body.model, 1
        self.grammar_field = _renamed(body.grammar_field)

    def to_job(self, ready: Ready) -> Job:
        body: ChatBody | ChatWithPassages = self.body
        if self.turn is not None:
            body = ChatWithPassages(self.body, self.turn)
            self.messages[-1]["content"] = self.turn.message(ready.max_model_len)  # a later response begins with it
        try:
            return body.to_job(ready)
        except ApiError as error:
            if error.param is not None:
                ours = _renamed(error.param)
                if error.message.startswith(error.param):
                    error.message = ours + error.message.removeprefix(error.param)
                error.param = ours
            raise


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the chat API's shape, with the function inside."""
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _response_format(given: TextFormat) -> dict[str, Any]:
    """`text.format` as `response_format`, where the schema is inside."""
    extra = given.model_extra or {}
    return {"type": given.type, **({"json_schema": extra} if given.type == "json_schema" else {})}


def _renamed(param: str) -> str:
    """The field of this body for a field of the chat request, e.g. tools.0.name for tools.0.function.name."""
    first, dot, rest = param.partition(".")
    return NAMES.get(first, first) + dot + rest.replace("function.", "")
