"""The fields that constrain the output: OpenAI's `response_format` and vLLM's `structured_outputs`.

Both become a `Grammar`. A schema is always enforced, with and without `strict`. Options of `structured_outputs` that
this server does not have are refused.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from bagu.errors import ArgumentError
from bagu.serve.grammar import Grammar
from bagu.serve.http.bodies.fields import STRUCTURED_OUTPUTS, refuse_unsupported
from bagu.serve.http.errors import ApiError

Schema = dict[str, Any] | bool


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class JsonSchema(_Part):
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Schema | None = Field(None, alias="schema")


class ResponseFormat(_Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Grammar.json_object()
        if self.json_schema is None or self.json_schema.schema_ is None:
            hint = 'send {"type": "json_schema", "json_schema": {"name": "...", "schema": {...}}}'
            raise ApiError(400, "response_format has no json_schema.schema", param="response_format", hint=hint)
        return Grammar.json_schema(self.json_schema.schema_)


class StructuredOutputs(_Part):
    """Exactly one of these fields is set; null and false count as not set. `whitespace_pattern` goes with JSON."""

    json_: Annotated[Schema | str | None, Field(alias="json", description="a JSON Schema, or one as a string")] = None
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: Annotated[
        str | None, Field(description="a regular expression of what may stand between two tokens of JSON")
    ] = None

    def to_grammar(self) -> Grammar:
        refuse_unsupported(self.model_extra or {}, STRUCTURED_OUTPUTS, within="structured_outputs")
        schema = self.json_
        given = {
            "json": schema,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object or None,
        }
        names = [name for name, value in given.items() if value is not None]
        if len(names) != 1:
            found = " and ".join(names) or "nothing"
            hint = f"set exactly one of {', '.join(given)}"
            raise ApiError(400, f"structured_outputs sets {found}", param="structured_outputs", hint=hint)
        whitespace = self.whitespace_pattern
        if isinstance(schema, str):
            return Grammar("json_schema", schema, whitespace)
        if schema is not None:
            return Grammar.json_schema(schema, whitespace=whitespace)
        if self.json_object:
            return Grammar.json_object(whitespace=whitespace)
        if whitespace is not None:
            hint = "leave it out, or send json or json_object"
            raise ApiError(400, "whitespace_pattern is for JSON", param="structured_outputs", hint=hint)
        if self.regex is not None:
            return Grammar.regex(self.regex)
        return Grammar.choice(self.choice) if self.choice is not None else Grammar.lark(self.grammar or "")


def grammar_of(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> Grammar | None:
    """The grammar that these fields ask for. Raises 400 if they contradict each other or cannot be a grammar."""
    param = "response_format" if structured_outputs is None else "structured_outputs"
    try:
        first = None if response_format is None else response_format.grammar()
        second = None if structured_outputs is None else structured_outputs.to_grammar()
    except ArgumentError as error:
        raise ApiError(400, str(error), param=param, hint=error.hint) from error
    except RecursionError as error:
        raise ApiError(400, "the schema is nested too deeply", param=param) from error
    if first is not None and second is not None:
        hint = "leave one of them out"
        raise ApiError(400, "response_format and structured_outputs both constrain the output", param=param, hint=hint)
    return first or second
