"""The forms in which models write tool calls. A form is a parser and the literal text around a name and arguments.

hermes        <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>        Qwen, Hermes, SmolLM3, bagu
llama3        {"name": "f", "parameters": {...}}, also after <|python_tag|>       Llama 3.1 and 3.2
mistral       [TOOL_CALLS][{"name": "f", "arguments": {...}}]                     Mistral to v7 of its tokenizer
mistral_v11   [TOOL_CALLS]f[ARGS]{...}                                            Mistral since v11
deepseek_v3   its markers around "function", the name, and a fenced JSON block    DeepSeek V3, R1
deepseek_v31  its markers around the name and the arguments                       DeepSeek V3.1
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bagu.errors import UnknownName
from bagu.serve.message.json_text import SPACE
from bagu.serve.message.parser import MessageParser
from bagu.serve.message.reader import Steps

NAME = re.compile(r"[A-Za-z0-9_.-]*")
LINE = re.compile(r"[^<\n]*")
CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE = "```"


@dataclass(frozen=True, kw_only=True)
class ToolForm:
    """One form. A message with calls is `opening`, the calls with `separator` between them, `closing`; a call is
    `before` (with its name in place of NAME), the arguments as JSON, `after`."""

    name: str
    parse: Callable[[MessageParser], Steps[None]]
    before: str
    after: str = ""
    opening: str = ""
    separator: str = ""
    closing: str = ""
    trigger: str | None = None  # the marker that begins calls after text; None: calls are the whole message
    markers: tuple[str, ...] = ()  # parts of these texts that are one token in the model's vocabulary
    history: Literal["object", "text"] = "object"  # how the template expects the arguments of earlier calls
    short_ids: bool = False  # Mistral's template accepts only ids of 9 letters and digits


def _hermes(p: MessageParser) -> Steps[None]:
    while (yield from p.text_until("<tool_call>")):
        if (yield from p.attempt(p.object_call("<tool_call>"))):
            yield from p.skip("</tool_call>")


def _llama3(p: MessageParser) -> Steps[None]:
    """Without a marker, a call is recognized only at the start of a message and after another call."""
    more = yield from p.attempt(p.object_call())
    while True:
        while more:
            more = yield from p.attempt(p.object_call(";"))
        if not (yield from p.text_until("<|python_tag|>")):
            return
        more = yield from p.attempt(p.object_call("<|python_tag|>"))


def _mistral(p: MessageParser) -> Steps[None]:
    def first() -> Steps[None]:
        """`[TOOL_CALLS]`, then the first call of a list, or a name and its arguments."""
        yield from p.reader.expect("[TOOL_CALLS]")
        yield from p.reader.run(SPACE)
        if (yield from p.reader.literal("[")):
            yield from p.object_call()
            return
        name = yield from p.reader.run(NAME)
        if (yield from p.reader.literal("[CALL_ID]")):
            yield from p.reader.run(NAME)
        yield from p.named_call(name, "[ARGS]")

    while (yield from p.text_until("[TOOL_CALLS]")):
        more = yield from p.attempt(first())
        while more:
            more = yield from p.attempt(p.object_call(","))
            if not more:
                yield from p.skip("]")


def _deepseek(p: MessageParser) -> Steps[None]:
    def call() -> Steps[None]:
        yield from p.reader.literal(CALLS)
        yield from p.reader.run(SPACE)
        yield from p.reader.expect(CALL)
        head = (yield from p.reader.run(LINE)).strip()
        yield from p.reader.expect(SEP)
        if head == "function":
            name = (yield from p.reader.run(LINE)).strip()
            yield from p.named_call(name, f"{FENCE}json")
        else:
            yield from p.named_call(head)

    while (yield from p.text_until(CALLS, CALL)):
        if (yield from p.attempt(call())):
            for end in (FENCE, END_CALL, END_CALLS):
                yield from p.skip(end)


FORMS = {
    form.name: form
    for form in (
        ToolForm(
            name="hermes", parse=_hermes, before='<tool_call>\n{"name": "NAME", "arguments": ',
            after="}\n</tool_call>", separator="\n", trigger="<tool_call>", markers=("<tool_call>", "</tool_call>"),
        ),
        ToolForm(
            name="llama3", parse=_llama3, before='{"name": "NAME", "parameters": ', after="}", separator="; ",
            markers=("<|python_tag|>",),
        ),
        ToolForm(
            name="mistral", parse=_mistral, opening="[TOOL_CALLS][", before='{"name": "NAME", "arguments": ', after="}",
            separator=", ", closing="]", trigger="[TOOL_CALLS]", markers=("[TOOL_CALLS]",), short_ids=True,
        ),
        ToolForm(
            name="mistral_v11", parse=_mistral, before="[TOOL_CALLS]NAME[ARGS]", trigger="[TOOL_CALLS]", short_ids=True,
            markers=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        ),
        ToolForm(
            name="deepseek_v3", parse=_deepseek, opening=CALLS, before=f"{CALL}function{SEP}NAME\n{FENCE}json\n",
            after=f"\n{FENCE}{END_CALL}", separator="\n", closing=END_CALLS, trigger=CALLS, history="text",
            markers=(CALLS, CALL, SEP, END_CALL, END_CALLS),
        ),
        ToolForm(
            name="deepseek_v31", parse=_deepseek, opening=CALLS, before=f"{CALL}NAME{SEP}", after=END_CALL,
            closing=END_CALLS, trigger=CALLS, history="text", markers=(CALLS, CALL, SEP, END_CALL, END_CALLS),
        ),
    )
}  # fmt: skip


def find_form(template: str, parser: str = "auto") -> ToolForm | None:
    """The form named `parser`; for "auto" the form that the chat template shows, for "none" no form."""
    if parser == "none":
        return None
    if parser != "auto":
        if parser not in FORMS:
            raise UnknownName.among("tool parser", parser, ("auto", "none", *FORMS))
        return FORMS[parser]
    if "tools" not in template or any(part in template for part in ("<function=", "<arg_key>")):  # unknown XML forms
        return None
    shown = (
        ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
        ("mistral", ("[TOOL_CALLS]",)),
        ("deepseek_v3", (CALL, f"{FENCE}json")),
        ("deepseek_v31", (CALL,)),
        ("hermes", ("<tool_call>", "arguments")),
        ("llama3", ("<|python_tag|>",)),
        ("llama3", ("<|start_header_id|>", "parameters")),
    )
    return next((FORMS[name] for name, parts in shown if all(part in template for part in parts)), None)
