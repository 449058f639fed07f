"""The fields of a request that offer tools: `tools`, `tool_choice`, `parallel_tool_calls`.

auto      the model decides; a call is parsed from its text. If a tool is strict, a grammar makes its arguments valid.
required  a grammar admits one call or more, and nothing else.
named     the same with one call of this function.
none      the prompt does not contain the tools.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from bagu.serve.constrain.finite import has_finite_instance
from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.errors import ApiError
from bagu.serve.message.forms import ToolForm
from bagu.serve.message.schema_check import schema_error
from bagu.serve.message.tool_grammar import Tool
from bagu.serve.wire.messages import Ready

MAX_TOOLS = 512
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
Mode = Literal["auto", "required"]


class FunctionDefinition(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema; None: the function has no parameters
    strict: bool | None = None


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class NamedFunction(Body):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | None,
    Field(description='"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'),
]


class ToolFields(Body):
    """Mixed into the body of a chat."""

    tools: Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def mode(self) -> Mode:
        """Whether a call is required."""
        return "auto" if self.tool_choice in (None, "auto") else "required"

    @property
    def max_calls(self) -> int | None:
        named = isinstance(self.tool_choice, NamedFunction)
        return 1 if named or self.parallel_tool_calls is False else None

    def chosen_tools(self) -> list[Tool]:
        """The tools that may be called. Raises 400 for a tool that is wrong or unknown."""
        found: dict[str, Tool] = {}
        for i, tool in enumerate(self.tools or ()):
            function, place = tool.function, f"tools.{i}.function"
            if function.name in found:
                hint = "names are unique: rename one of them"
                raise ApiError(400, f"two tools are named {function.name!r}", param=f"{place}.name", hint=hint)
            parameters, param = function.parameters or {}, f"{place}.parameters"
            made = Tool(name=function.name, parameters=parameters, strict=function.strict is True)
            error = schema_error(parameters)
            if error is None and parameters.get("type", "object") != "object":
                error = f"type {parameters['type']!r:.40} is not 'object'"
            if error is None and not has_finite_instance(made.schema):
                error = "it recurses without end"
            if error is not None:
                raise ApiError(400, f"{param} is not a JSON Schema of an object: {error}", param=param)
            found[function.name] = made
        choice = self.tool_choice
        if choice in (None, "none", "auto"):
            return list(found.values())
        if not found:
            raise ApiError(400, "tool_choice needs tools", param="tool_choice", hint="add tools, or leave it out")
        if isinstance(choice, NamedFunction):
            if choice.function.name not in found:
                hint = f"the tools are: {', '.join(found)[:200]}"
                message = f"tool_choice names {choice.function.name!r:.80}, which is not among the tools"
                raise ApiError(400, message, param="tool_choice", hint=hint)
            return [found[choice.function.name]]
        return list(found.values())

    def definitions(self) -> list[dict[str, Any]]:
        """The tools as the client sent them, for the chat template."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools or ()]


def tool_form(ready: Ready) -> ToolForm:
    """The form of this model's calls. Raises 400 if it has none."""
    if ready.tool_form is None:
        hint = "bagu serve --tool-parser names the form of its calls, if it was trained to make them"
        raise ApiError(400, "this model's chat template shows no known form of tool calls", param="tools", hint=hint)
    return ready.tool_form
