"""Chat templates: Jinja templates, as in tokenizer_config.json, that render messages as one text.

They run in Jinja's sandbox with the environment of `transformers`: the same options, `tojson`, `raise_exception`,
`strftime_now`, and `{% generation %} ... {% endgeneration %}` blocks around the assistant's text.
"""

import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn, Self

import jinja2
import jinja2.ext
import jinja2.sandbox

from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError

# Tools are listed in their own system turn. Calls and results are in tags inside the turns, as in Qwen's template: this
# needs only the control tokens that every tokenizer of bagu has.
DEFAULT_TEMPLATE = """\
{%- if tools -%}
<|system|>You may call these functions, each as <tool_call>{"name": ..., "arguments": {...}}</tool_call>:
{%- for tool in tools %}{{ "\\n" ~ (tool | tojson) }}{% endfor -%}
<|end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
<|assistant|>{% generation %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function or call -%}
<tool_call>{{ {"name": function.name, "arguments": function.arguments} | tojson }}</tool_call>
{%- endfor -%}
<|end|>{% endgeneration %}
{%- elif message.role == "user" -%}
<|user|>{{ message.content }}<|end|>
{%- elif message.role == "system" or message.role == "developer" -%}
<|system|>{{ message.content }}<|end|>
{%- elif message.role == "tool" -%}
<|user|><tool_response>{{ message.content }}</tool_response><|end|>
{%- else -%}
{{- raise_exception("the roles are system, user, assistant and tool, this message has " ~ message.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # noncharacters that mark the assistant's text

Message = Mapping[str, Any]  # role, content, and other keys that a template reads
Span = tuple[int, int]  # start and end character in a text


class _Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: puts marks around the output of the block."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{OPEN}{caller()}{CLOSE}"


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A Jinja chat template and the variables it reads in addition to the messages (`eos_token`, ...)."""

    source: str
    variables: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Load the template from a tokenizer's folder, with the tokens named in tokenizer_config.json."""
        tokenizer = BpeTokenizer.load(folder)
        if tokenizer.chat_template is None:
            raise BaguError(f"{folder} has no chat template", hint="add chat_template.jinja, e.g. DEFAULT_TEMPLATE")
        return cls(source=tokenizer.chat_template, variables=tokenizer.variables)

    @property
    def marks_generation(self) -> bool:
        """Whether the template has generation blocks."""
        return re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False, **variables: Any) -> str:
        """The text of a chat. With `add_generation_prompt` it ends where the assistant's answer starts."""
        return self.render_spans(messages, add_generation_prompt=add_generation_prompt, **variables)[0]

    def render_spans(self, messages: Sequence[Message], **variables: Any) -> tuple[str, list[Span]]:
        """The text, and the spans that the generation blocks wrote."""
        values = {"tools": None, "add_generation_prompt": False, **self.variables, **variables}
        try:
            return _take_marks(self._compiled.render(messages=list(messages), **values))
        except (jinja2.TemplateError, TypeError) as error:  # TypeError: the template concatenates a content of None
            roles = ", ".join(str(m.get("role")) for m in messages) or "none"
            hint = f"the roles of its messages: {roles}"
            raise BaguError(f"the chat template rejects this chat: {error}", hint=hint) from error

    @cached_property
    def _compiled(self) -> jinja2.Template:
        # the environment that transformers gives a template: the same options, filter and functions
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        try:
            return environment.from_string(self.source)
        except jinja2.TemplateSyntaxError as error:
            hint = "correct chat_template in tokenizer_config.json"
            raise BaguError(f"line {error.lineno} of the chat template: {error.message}", hint=hint) from error


def _take_marks(marked: str) -> tuple[str, list[Span]]:
    """Remove the marks of generation blocks; return the text and the spans between them."""
    parts: list[str] = []
    spans: list[Span] = []
    at = start = 0
    for part in re.split(f"([{OPEN}{CLOSE}])", marked):
        if part == OPEN:
            start = at
        elif part == CLOSE:
            spans.append((start, at))
        else:
            parts.append(part)
            at += len(part)
    return "".join(parts), spans


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which is wrong for a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
