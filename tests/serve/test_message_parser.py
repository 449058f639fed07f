"""Parsing generated text into reasoning, content and tool calls: every form, in pieces and whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu.errors import UnknownName
from bagu.serve.message.forms import CALL, CALLS, END_CALL, END_CALLS, FORMS, SEP, find_form
from bagu.serve.message.json_text import MAX_DEPTH
from bagu.serve.message.parser import Content, Delta, MessageParser, Reasoning

Message = tuple[str, str, list[tuple[str, str]]]  # content, reasoning, calls (name, arguments)
NAMES = ("f", "get_weather")


def message(deltas: Sequence[Delta]) -> Message:
    """What a client assembles from the deltas."""
    content = "".join(d.text for d in deltas if isinstance(d, Content))
    reasoning = "".join(d.text for d in deltas if isinstance(d, Reasoning))
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if isinstance(delta, Content | Reasoning):
            continue
        if delta.name is not None:
            assert delta.index == len(calls), "the first delta of a call has its name"
            calls.append((delta.name, ""))
        name, arguments = calls[delta.index]
        calls[delta.index] = name, arguments + delta.arguments
    return content, reasoning, calls


def parsed(form: str | None, pieces: Sequence[str], **options: Any) -> Message:
    parser = MessageParser(None if form is None else FORMS[form].parse, NAMES, **options)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return message(deltas + parser.finish())


ONE, TWO = '{"city": "Köln", "days": [1, 2.5e3, null], "a": {"}": "]\\"\\u00e9"}}', "{}"
TWO_CALLS = [
    ("hermes", f'<tool_call>\n{{"name": "f", "arguments": {ONE}}}\n</tool_call>\n'
               f'<tool_call>{{"arguments": {TWO}, "name": "get_weather"}}</tool_call>'),
    ("llama3", f'{{"name": "f", "parameters": {ONE}}}; '
               f'{{"type": "function", "name": "get_weather", "parameters": {TWO}}}'),
    ("llama3", f'<|python_tag|>{{"name": "f", "parameters": {ONE}}};{{"name": "get_weather", "arguments": {TWO}}}'),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {ONE}}}, '
                f'{{"name": "get_weather", "arguments": {TWO}, "id": "abcdefghi"}}]'),
    ("mistral_v11", f"[TOOL_CALLS]f[ARGS]{ONE}[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{TWO}"),
    ("deepseek_v3", f"{CALLS}{CALL}function{SEP}f\n```json\n{ONE}\n```{END_CALL}\n"
                    f"{CALL}function{SEP}get_weather\n```json\n{TWO}\n```{END_CALL}{END_CALLS}"),
    ("deepseek_v31", f"{CALLS}{CALL}f{SEP}{ONE}{END_CALL}{CALL}get_weather{SEP}{TWO}{END_CALL}{END_CALLS}"),
]  # fmt: skip


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("form", "text"), TWO_CALLS)
def test_two_calls_are_found_in_every_form(form: str, text: str, live: bool) -> None:
    calls = [("f", ONE), ("get_weather", TWO)]
    assert parsed(form, [text], live=live) == ("", "", calls)
    assert parsed(form, list(text), live=live) == ("", "", calls)
    assert parsed(form, [text], live=live, max_calls=1) == ("", "", calls[:1])
    if FORMS[form].trigger is not None:
        assert parsed(form, [f"I look.\n{text}\n"], live=live) == ("I look.", "", calls)
        assert parsed(form, [f"I look.\n{text}\nDone."], live=live)[::2] == ("I look.\nDone.", calls)


@pytest.mark.parametrize("form", FORMS)
def test_the_literals_of_a_form_are_parsed_by_it(form: str) -> None:
    """The grammar of required calls consists of these literals."""
    found = FORMS[form]
    calls = [found.before.replace("NAME", name) + '{"a": 1}' + found.after for name in NAMES]
    text = found.opening + found.separator.join(calls) + found.closing
    assert parsed(form, [text]) == ("", "", [(name, '{"a": 1}') for name in NAMES])


MALFORMED = [
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\n"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\x"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * MAX_DEPTH}{"]" * MAX_DEPTH}}}}}</tool_call>'),
    ("hermes", "<tool_call> and <tool_call> and </tool_call> <tool"),
    ("llama3", '{"name": "Ada", "parameters": {}}'), ("llama3", '{"city": "Köln"}  '), ("llama3", "<|python_tag|>f(1)"),
    ("llama3", 'It is {"name": "f", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS] none"), ("mistral", '[TOOL_CALLS][{"name": "f"}]'),
    ("mistral_v11", "[TOOL_CALLS]f[ARGS]"),
    ("deepseek_v3", f"{CALLS}{CALL}function{SEP}f\n```json\n[]\n```{END_CALL}{END_CALLS}"),
    ("deepseek_v31", f"{CALLS}{CALL}"), ("deepseek_v31", f"{CALLS}{CALL}\\{SEP}"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), MALFORMED)
def test_malformed_calls_stay_text(form: str, text: str) -> None:
    assert parsed(form, [text]) == parsed(form, list(text)) == (text, "", [])


def test_a_call_after_a_malformed_one_is_found() -> None:
    text = '<tool_call>oops</tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parsed("hermes", [text]) == ("<tool_call>oops</tool_call>", "", [("f", "{}")])


def test_live_arguments_are_sent_as_they_arrive() -> None:
    parser = MessageParser(FORMS["hermes"].parse, NAMES, live=True)
    pieces = ['<tool_call>\n{"name": "f", "arg', 'uments": {"a"', ": 1", "2}}\n</tool_call>"]
    sent = [message(parser.push(piece))[2] if i == 1 else parser.push(piece) for i, piece in enumerate(pieces)]
    assert sent[0] == [] and sent[1] == [("f", '{"a"')]
    assert [delta.arguments for piece in sent[2:] for delta in piece] == [": 1", "2}"]  # type: ignore[union-attr]
    parser = MessageParser(FORMS["hermes"].parse, NAMES, live=True)
    cut = parser.push('<tool_call>\n{"name": "f", "arguments": {"a": "b') + parser.finish()
    assert message(cut) == ("", "", [("f", '{"a": "b')])  # max_tokens ended it, as in OpenAI's API


@pytest.mark.parametrize(("form", "text"), TWO_CALLS)
def test_the_beginning_of_a_required_call_is_not_content(form: str, text: str) -> None:
    """Where max_tokens cut a call before its arguments, the message was `<tool_call>{"na`."""
    for size in range(len(text)):
        content, _, calls = parsed(form, [text[:size]], live=True, required=True)
        assert content == "" and all(name in NAMES for name, _ in calls)
    cut = parsed("hermes", ["I look. <tool_call>{"], live=True)  # strict tools, with text before them
    assert (cut[0].rstrip(), cut[2]) == ("I look.", [])


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\nwell\n</think>\n\nHello", False, ("Hello", "well", [])),
        ("well\n</think>\n\nHello ", True, ("Hello ", "well", [])),
        ("<think>well</think>Hello", True, ("Hello", "well", [])),  # the prompt ends with <think>, the model repeats it
        ("<think>\n\n</think>\n\nHello", False, ("Hello", "", [])),
        ("Hello <think>well</think>", False, ("Hello <think>well</think>", "", [])),
        ("well, cut", True, ("", "well, cut", [])),
        (
            '<think>a <tool_call></think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
            False,
            ("", "a <tool_call>", [("f", "{}")]),
        ),
    ],
)
def test_reasoning_is_separated(text: str, thinking: bool, expected: Message) -> None:
    for pieces in ([text], list(text)):
        assert parsed("hermes", pieces, thinks=True, thinking=thinking) == expected
    if not expected[2]:
        assert parsed(None, [text], thinks=True, thinking=thinking) == expected


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{", "}", ",", ";", ":", '"', "\\",
    '"name"', '"arguments"', '"parameters"', '"f"', '"other"', "f", '{"name": "f", "arguments": ', "{}", '{"a": 1}',
    '{"name": "f", "parameters": {"a": ["x", true]}}', " ", "\n", "text", "é", "<think>", "</think>", "<|python_tag|>",
    CALLS, CALL, SEP, END_CALL, END_CALLS, "function", "\n```json\n", "\n```",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100)
@given(data=st.data())
def test_pieces_give_the_same_message_as_the_whole_text(form: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS), max_size=24)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    options = data.draw(
        st.fixed_dictionaries({"live": st.booleans(), "thinks": st.booleans(), "thinking": st.booleans()})
    )
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(form, [text], **options)
    assert parsed(form, pieces, **options) == whole
    content, reasoning, calls = whole
    if not calls and not options["thinks"] and not options["thinking"]:
        assert content == text or (options["live"] and text.startswith(content)), "text without calls is unchanged"
    if not options["live"]:
        assert all(name in NAMES and isinstance(json.loads(arguments), dict) for name, arguments in calls)
    assert all(arguments in text for _, arguments in calls)
    assert not reasoning or options["thinks"] or options["thinking"]


def test_the_form_is_found_in_the_template() -> None:
    from bagu.data.chat_template import DEFAULT_TEMPLATE

    templates = {
        "hermes": '{% if tools %}<tool_call>\\n{"name": <function-name>, "arguments": <args>}</tool_call>{% endif %}',
        "llama3": '{% if tools %}<|start_header_id|>{"name": function name, "parameters": ...}{% endif %}',
        "mistral": '{% if tools %}{{ "[TOOL_CALLS][" }}{% endif %}',
        "mistral_v11": "{% if tools %}[TOOL_CALLS]{{ name }}[ARGS]{% endif %}",
        "deepseek_v3": f"{{% if tools %}}{CALL}function{SEP}\\n```json{{% endif %}}",
        "deepseek_v31": f"{{% if tools %}}{CALL}{SEP}{{% endif %}}",
    }
    for name, template in templates.items():
        assert find_form(template) is FORMS[name]
    assert find_form(DEFAULT_TEMPLATE) is FORMS["hermes"]
    assert find_form("{% if tools %}<tool_call><function=f><parameter=arguments>{% endif %}") is None  # Qwen3-Coder
    assert find_form("{{ messages }}") is None and find_form(DEFAULT_TEMPLATE, "none") is None
    assert find_form("{{ messages }}", "llama3") is FORMS["llama3"]
    with pytest.raises(UnknownName, match="tool parser 'lama3'"):
        find_form("", "lama3")
