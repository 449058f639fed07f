"""The grammar of a message that calls tools: the form's literals around a name, and arguments that fit its schema.

A marker that is a control token of the model (`[TOOL_CALLS]`) is written as its token: no text is encoded as one.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagu.serve.grammar import SPACING, Grammar
from bagu.serve.message.forms import ToolForm
from bagu.serve.message.parser import END_THINK, THINK

OPTIONS = {"x-guidance": SPACING}  # of llguidance, in a schema within Lark
OPEN_SCHEMA = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that a model may call."""

    name: str
    parameters: Mapping[str, Any]  # JSON Schema of the arguments
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """`parameters` as an object that has no keys besides those it lists, unless it says so."""
        closed = {} if any(key in self.parameters for key in OPEN_SCHEMA) else {"additionalProperties": False}
        return {"type": "object", "properties": {}, **closed, **self.parameters, **OPTIONS}


def tool_grammar(
    form: ToolForm,
    tools: Sequence[Tool],
    *,
    max_calls: int | None,
    special_ids: Mapping[str, int],
    required: bool = True,
    content: Grammar | None = None,
    thinks: bool = False,
    thinking: bool = False,
) -> Grammar:
    """A message of one or more calls (at most `max_calls`), after reasoning if the model thinks. If they are not
    `required`, the message may also be text, or text before calls; with `content`, JSON of this grammar instead. (A
    form without a trigger has no such grammar: both would begin with "{".)"""
    write = _Writer(form, tools, special_ids)
    more = "" if max_calls == 1 else f"({write.literal(form.separator)} call)*"
    rest = f"{more} {write.literal(form.closing)}"  # of a message, after its first call
    think = "think" if thinking else "think?" if thinks else ""
    rules = [f"start: {think} {'calls' if required else 'message'}"]
    rules += [f"calls: {write.literal(form.opening)} call {rest}", *write.calls("call", form.before)]
    rules += [f"arguments_{i}: %json {json.dumps(tool.schema)}" for i, tool in enumerate(tools)]
    if thinks or thinking:
        opens = "" if thinking else write.literal(THINK)
        rules += [f"think: {opens} thoughts /[ \\t\\r\\n]*/", f"thoughts[suffix={json.dumps(END_THINK)}]: /(?s:.*)/"]
    if not required:
        rules += _content_rules(content) if content is not None else _text_rules(write, rest)
    return _lark(rules)


@dataclass(frozen=True)
class _Writer:
    """Writes the rules of a form in Lark's syntax."""

    form: ToolForm
    tools: Sequence[Tool]
    special_ids: Mapping[str, int]

    def literal(self, text: str) -> str:
        """This text; control tokens by their ids."""
        names = sorted((name for name in self.form.markers if name in self.special_ids), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return " ".join(f"<[{self.special_ids[p]}]>" if p in names else json.dumps(p) for p in parts if p)

    def calls(self, rule: str, before: str) -> list[str]:
        """`rule` is a call of any tool: `before` with the tool's name, its arguments, and the end of the call."""
        numbers, after = range(len(self.tools)), self.literal(self.form.after)
        starts = [self.literal(before.replace("NAME", tool.name)) for tool in self.tools]
        any_tool = f"{rule}: {' | '.join(f'{rule}_{i}' for i in numbers)}"
        return [any_tool, *(f"{rule}_{i}: {starts[i]} arguments_{i} {after}" for i in numbers)]


def _content_rules(content: Grammar) -> list[str]:
    """A message that is JSON of the grammar `content`, or calls."""
    schema = json.loads(content.text) if content.kind == "json_schema" else {"type": "object"}
    spaced = {**schema, "x-guidance": content.json_options} if isinstance(schema, dict) else schema
    return ["message: content | calls", f"content: %json {json.dumps(spaced)}"]


def _text_rules(write: _Writer, rest: str) -> list[str]:
    """A message that is text, with or without calls at its end. `rest` is what follows the first call."""
    form = write.form
    if form.trigger is None:  # a call has no marker: it is a message that begins with "{"
        return ["message: TEXT | calls", r"TEXT: /([^{ \t\r\n](?s:.*))?/"]
    if form.trigger in write.special_ids:  # no text is encoded as this token
        return ["message: TEXT calls?", "TEXT: /(?s:.*)/"]
    # text with the trigger is one lexeme: a lexeme of text alone would take the trigger's first characters
    opening, before = form.opening.removeprefix(form.trigger), form.before
    if not form.opening:
        before = before.removeprefix(form.trigger)
    return [
        f"message: TEXT | text_before_call {write.literal(opening)} first {rest}",
        *write.calls("first", before),
        f"text_before_call[suffix={json.dumps(form.trigger)}]: /(?s:.*)/",
        f"TEXT: /(?s:.*)/ & ~/(?s:.*){re.escape(form.trigger)}(?s:.*)/",
    ]


def _lark(rules: list[str]) -> Grammar:
    """`::=` in a schema's strings is escaped: it marks grammars in GBNF."""
    return Grammar.lark("\n".join(rules).replace("::=", r"::\u003d"))
