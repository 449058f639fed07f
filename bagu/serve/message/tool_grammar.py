"""The grammar of a message that calls tools: the form's literals around a name, and arguments that fit its schema.

A marker that is a control token of the model (`[TOOL_CALLS]`) is written as its token: no text is encoded as one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagu.serve.grammar import Grammar
from bagu.serve.message.forms import ToolForm
from bagu.serve.message.parser import END_THINK, THINK

__all__ = ["Tool", "tool_grammar"]

# the spaces that templates and training data have (json.dumps); free white space would let a weak model loop in it
SPACING = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
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
        return {"type": "object", "properties": {}, **closed, **self.parameters, **SPACING}


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
    `required`, the message may also be text, or text before calls; with `content`, JSON of this
    grammar instead. (A form without a trigger has no such grammar: both would begin with "{".)"""

    def literal(text: str) -> str:
        """Lark for this text; control tokens by their ids."""
        names = sorted((name for name in form.markers if name in special_ids), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return " ".join(f"<[{special_ids[p]}]>" if p in names else json.dumps(p) for p in parts if p)

    def call(i: int, before: str) -> str:
        return f"{literal(before.replace('NAME', tools[i].name))} arguments_{i} {literal(form.after)}"

    count = range(len(tools))
    more = "" if max_calls == 1 else f"({literal(form.separator)} call)*"
    rest = f"{more} {literal(form.closing)}"
    think = "think" if thinking else "think?" if thinks else ""
    rules = [f"start: {think} {'calls' if required else 'message'}", f"calls: {literal(form.opening)} call {rest}"]
    rules += [f"call: {' | '.join(f'call_{i}' for i in count)}", *(f"call_{i}: {call(i, form.before)}" for i in count)]
    rules += [f"arguments_{i}: %json {json.dumps(tool.schema)}" for i, tool in enumerate(tools)]
    if thinks or thinking:
        opens = "" if thinking else literal(THINK)
        rules += [f"think: {opens} thoughts /[ \\t\\r\\n]*/", f"thoughts[suffix={json.dumps(END_THINK)}]: /(?s:.*)/"]
    if required:
        return _lark(rules)
    if content is not None:
        schema = json.loads(content.text) if content.kind == "json_schema" else {"type": "object"}
        spaced = {**schema, **SPACING} if isinstance(schema, dict) else schema
        rules += ["message: content | calls", f"content: %json {json.dumps(spaced)}"]
    elif form.trigger is None:  # a call has no marker: it is a message that begins with "{"
        rules += ["message: TEXT | calls", r"TEXT: /([^{ \t\r\n](?s:.*))?/"]
    elif form.trigger in special_ids:  # no text is encoded as this token
        rules += ["message: TEXT calls?", "TEXT: /(?s:.*)/"]
    else:  # text with the trigger is one lexeme: a lexeme of text alone would take the trigger's first characters
        opening, before = form.opening.removeprefix(form.trigger), form.before
        if not form.opening:
            before = before.removeprefix(form.trigger)
        rules += [
            f"message: TEXT | text_before_call {literal(opening)} first {rest}",
            f"first: {' | '.join(f'first_{i}' for i in count)}",
            *(f"first_{i}: {call(i, before)}" for i in count),
            f"text_before_call[suffix={json.dumps(form.trigger)}]: /(?s:.*)/",
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){re.escape(form.trigger)}(?s:.*)/",
        ]
    return _lark(rules)


def _lark(rules: list[str]) -> Grammar:
    """`::=` in a schema's strings is escaped: it marks grammars in GBNF."""
    return Grammar.lark("\n".join(rules).replace("::=", r"::\u003d"))
