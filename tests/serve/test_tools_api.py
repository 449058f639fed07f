"""Tools and reasoning on /v1/chat/completions: the openai client and plain bodies against real servers.

A random model calls no tools by itself. Required and named calls are constrained; for free ones `structured_outputs`
admits exactly one text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from api_client import ASK, CHAT, post
from tiny_server import MODEL, Running, load, openai_client, running_server

from bagu.data.chat import ChatEncoder, ChatTemplate
from bagu.data.tokenizer import SPECIAL_TOKENS
from bagu.serve.chat.clients import HttpChat
from bagu.serve.http.bodies.chat import ChatBody
from bagu.serve.http.bodies.messages import for_template
from bagu.serve.http.bodies.parse import parse
from bagu.serve.http.errors import ApiError
from bagu.serve.http.openapi.schemas import ChatCompletion
from bagu.serve.message.forms import FORMS
from bagu.serve.wire.messages import Ready

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
SCHEMAS = {"get_weather": PARAMETERS, "clock": {"type": "object", "additionalProperties": False}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": ASK, "tools": [WEATHER, CLOCK], "max_tokens": 300, **fields}


def forced(text: str) -> dict[str, Any]:
    """The model writes exactly this text."""
    return {"extra_body": {"structured_outputs": {"choice": [text]}}}


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[Any, list[Any]]:
    """The message assembled by the client's helper, and the deltas."""
    with client.chat.completions.stream(**fields) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        return stream.get_final_completion().choices[0], [c.choices[0].delta for c in chunks if c.choices]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_required_and_named_calls_validate(client: openai.OpenAI, choice: Any) -> None:
    for seed in range(3):
        found = client.chat.completions.create(**ask(tool_choice=choice, seed=seed, parallel_tool_calls=False))
        (answer,) = found.choices
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        (call,) = answer.message.tool_calls or ()
        assert call.type == "function" and call.id.startswith("call_")
        assert choice == "required" or call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_streamed_calls_are_the_whole_calls_in_deltas(client: openai.OpenAI, tiny: Running) -> None:
    fields = ask(tool_choice="required", seed=3)
    whole = client.chat.completions.create(**fields).choices[0]
    final, deltas = streamed(client, **fields, stream_options={"include_usage": True})
    calls = [c.function for c in whole.message.tool_calls or ()]
    assert [(c.function.name, c.function.arguments) for c in final.message.tool_calls] == [
        (c.name, c.arguments) for c in calls
    ]
    assert final.finish_reason == whole.finish_reason
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    first = {part.index: part for part in reversed(parts)}
    assert all(part.id and part.function.name and part.type == "function" for part in first.values())
    assert deltas[0].content == deltas[-1].content == "" and deltas[-1].tool_calls is None  # as without tools
    rest = [part for part in parts if part is not first[part.index]]
    assert all(part.id is None and part.function.name is None and part.function.arguments for part in rest)
    body = ChatCompletion.model_validate_json(post(tiny, CHAT, fields).content, strict=True)
    assert body.choices[0].message.tool_calls[0].function.name == calls[0].name


def test_a_streamed_named_call_sends_its_arguments_in_pieces(client: openai.OpenAI) -> None:
    _, deltas = streamed(client, **ask(tool_choice=NAMED, seed=1))
    pieces = [part.function.arguments for delta in deltas for part in delta.tool_calls or ()]
    assert pieces[0] == "" and len(pieces) > 3  # the name comes first, then a piece per token or so


@pytest.mark.parametrize("stream", [False, True])
def test_a_required_call_that_is_cut_is_no_text(client: openai.OpenAI, stream: bool) -> None:
    for size in (1, 4, 9, 16, 24):
        fields = ask(tool_choice="required", seed=size, max_tokens=size)
        if stream:
            *chunks, last = (chunk.choices[0] for chunk in client.chat.completions.create(**fields, stream=True))
            assert last.finish_reason == "length" and not any(chunk.delta.content for chunk in chunks)
        else:
            found = client.chat.completions.create(**fields).choices[0]
            assert found.finish_reason == "length" and not found.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_a_free_call_is_parsed_from_the_text(client: openai.OpenAI, stream: bool) -> None:
    fields = {**ask(tool_choice="auto"), **forced(f"I look.\n{CALL}\n{CALL}")}
    found = streamed(client, **fields)[0] if stream else client.chat.completions.create(**fields).choices[0]
    assert (found.finish_reason, found.message.content) == ("tool_calls", "I look.")
    assert [json.loads(c.function.arguments) for c in found.message.tool_calls or ()] == [
        {"city": "Rome", "days": 2}
    ] * 2
    one = client.chat.completions.create(**fields, parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls or ()) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "text", ['<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', '<tool_call>{"name": "clock", ', "no  \n"]
)
def test_text_that_is_no_call_stays_content(client: openai.OpenAI, text: str, stream: bool) -> None:
    fields = {**ask(), **forced(text)}
    found = streamed(client, **fields)[0] if stream else client.chat.completions.create(**fields).choices[0]
    assert (found.finish_reason, found.message.content) == ("stop", text) and not found.message.tool_calls


def test_logprobs_of_all_tokens_are_streamed_with_calls(client: openai.OpenAI) -> None:
    fields = {**ask(), **forced(f"I look.\n{CALL}"), "logprobs": True, "seed": 1}
    whole = client.chat.completions.create(**fields).choices[0].logprobs
    parts = [c.choices[0].logprobs for c in client.chat.completions.create(**fields, stream=True)]
    assert whole is not None and whole.content
    assert [t.token for part in parts if part for t in part.content or ()] == [t.token for t in whole.content]


class Weather(pydantic.BaseModel):
    """Its fields are required, as OpenAI's strict mode demands."""

    city: Literal["Köln", "Rome"]
    days: int = pydantic.Field(ge=1, le=9)


class Answer(pydantic.BaseModel):
    text: Literal["yes", "no"]


def test_parse_of_the_openai_client_returns_pydantic_arguments(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather)
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [tool], "max_tokens": 300}
    found = client.chat.completions.parse(**fields, tool_choice="required", parallel_tool_calls=False, seed=1)
    (call,) = found.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Weather)
    with client.chat.completions.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert final and all(isinstance(call.function.parsed_arguments, Weather) for call in final)


def test_a_response_format_with_free_tools_admits_json_or_calls(client: openai.OpenAI) -> None:
    for seed in range(4):
        found = client.chat.completions.parse(
            model=MODEL, messages=ASK, tools=[openai.pydantic_function_tool(Weather)], response_format=Answer,
            seed=seed, max_tokens=300, parallel_tool_calls=False,
        )  # fmt: skip
        message = found.choices[0].message
        if message.tool_calls:
            assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)
        else:
            assert isinstance(message.parsed, Answer)


def test_a_conversation_with_results_is_rendered_by_the_template(client: openai.OpenAI, tiny: Running) -> None:
    """The agent's loop: the calls of an answer and their results are sent back."""
    first = client.chat.completions.create(**ask(tool_choice="required", parallel_tool_calls=False)).choices[0].message
    messages = [*ASK, first.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls or ()]
    usage = client.chat.completions.create(**ask(messages=messages, max_tokens=1)).usage
    assert usage is not None
    counts = [post(tiny, "/tokenize", {"messages": m}).json()["count"] for m in (ASK, messages)]
    tools = client.chat.completions.create(**ask(max_tokens=1)).usage
    assert tools is not None
    assert usage.prompt_tokens == tools.prompt_tokens + counts[1] - counts[0] > tools.prompt_tokens
    texts = post(tiny, "/detokenize", {"tokens": post(tiny, "/tokenize", {"messages": messages}).json()["tokens"]})
    call = (first.tool_calls or [])[0].function
    assert f'<tool_call>{{"name": "{call.name}", "arguments": ' in texts.json()["prompt"]
    assert "<tool_response>sunny</tool_response>" in texts.json()["prompt"]


def test_arguments_of_earlier_calls_are_what_the_templates_of_a_form_expect() -> None:
    """DeepSeek's templates add the text of the arguments to a string; the others write an object as JSON."""
    called = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": 1}'}}
    chat = [*ASK, {"role": "assistant", "content": None, "tool_calls": [called]}, {"role": "tool", "tool_call_id": "1"}]
    body = parse(ChatBody, json.dumps({"messages": chat}).encode())
    deepseek = "{% for m in messages if m.tool_calls %}{{ 'json\\n' + m.tool_calls[0].function.arguments }}{% endfor %}"
    others = "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endfor %}"
    for form, template, expected in (
        ("deepseek_v3", deepseek, 'json\n{"zone": 1}'),
        ("hermes", others, '{"name": "clock", "arguments": {"zone": 1}}'),
    ):
        messages = for_template(body.messages, FORMS[form])
        assert ChatTemplate(source=template).render(messages) == expected
        assert messages[1]["content"] is None and messages[2] == {"role": "tool", "tool_call_id": "1", "content": ""}


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": fields}]}


RECURSIVE = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
HISTORY = {"id": "x", "type": "function", "function": {"name": "clock", "arguments": "["}}


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name", "two tools are named 'get_weather'"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        (function(description="no name"), "tools.0.function.name", "required"),
        (function(name="two words"), "tools.0.function.name", "pattern"),
        (function(name="f", parameters={"type": "string"}), "tools.0.function.parameters", "object"),
        (function(name="f", parameters={"properties": {"a": {"type": "x"}}}), "tools.0.function.parameters", "'x'"),
        (function(name="f", parameters=RECURSIVE), "tools.0.function.parameters", "recurses without end"),
        (function(name="f", parameters=[]), "tools.0.function.parameters", "dictionary"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice", '"required"'),
        (
            {"tools": [WEATHER], "tool_choice": "required", "structured_outputs": {"choice": ["a"]}},
            "structured_outputs",
            "required call",
        ),
        (
            {**function(name="f", parameters={"properties": {"a": {"pattern": "("}}}), "tool_choice": "required"},
            "tools",
            "cannot be compiled",
        ),
        (
            {"messages": [*ASK, {"role": "assistant", "tool_calls": [HISTORY]}]},
            "messages.1.tool_calls.0.function.arguments",
            "JSON object",
        ),
    ],
)
def test_wrong_tools_are_refused_with_the_field(tiny: Running, fields: dict[str, Any], param: str, says: str) -> None:
    for stream in (False, True):
        answer = post(tiny, CHAT, {"messages": ASK, "max_tokens": 4, "stream": stream, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param) and says in error["message"], answer.text
    assert tiny.get("/health") and tiny.get("/engine")["blocks"]["used"] == 0


# --- reasoning, and a form whose marker is a control token ------------------------------------------------------------

TEMPLATE = """\
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif -%}
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
<|assistant|>{% generation %}{{ message.content or "" }}
{%- if message.tool_calls -%}
[TOOL_CALLS][{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}]
{%- endif -%}<|end|>{% endgeneration %}
{%- else -%}<|user|>{{ message.content }}<|end|>{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>
{% endif %}{% endif -%}
{#- reasoning ends with </think> -#}
"""


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A model that thinks in tags and writes calls as Mistral's models do."""
    folder = tmp_path_factory.mktemp("thinker")
    (folder / "template").write_text(TEMPLATE)
    with (
        running_server(folder / "stderr", "--template", str(folder / "template")) as server,
        openai_client(server.url) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_separate_from_the_content(thinker: openai.OpenAI, stream: bool, opened: bool) -> None:
    text = "well,\nyes</think>\n\nHello" if opened else "<think>\nwell,\nyes\n</think>\n\nHello"
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 200, **forced(text)}
    fields["extra_body"]["chat_template_kwargs"] = {"enable_thinking": opened}
    if stream:
        chunks = list(thinker.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
        reasoning = "".join(delta.get("reasoning_content") or "" for delta in deltas)
        content = "".join(delta["content"] or "" for delta in deltas)
        usage = chunks[-1].usage
    else:
        answer = thinker.chat.completions.create(**fields)
        message = answer.choices[0].message.model_dump()
        reasoning, content, usage = message["reasoning_content"], message["content"], answer.usage
    assert (reasoning, content) == ("well,\nyes", "Hello")
    assert usage is not None and usage.completion_tokens_details is not None
    assert 0 < (usage.completion_tokens_details.reasoning_tokens or 0) < usage.completion_tokens


def test_the_terminal_shows_reasoning_in_its_tags(thinker: openai.OpenAI) -> None:
    chat = HttpChat(str(thinker.base_url))
    settings: Any = {"max_tokens": 200, "structured_outputs": {"choice": ["<think>well,\nyes</think>Hello"]}}
    pieces = list(chat.answer([{"role": "user", "content": "hello"}], settings))
    assert "".join(piece.text for piece in pieces) == "<think>\nwell,\nyes\n</think>\n\nHello"


def test_reasoning_that_max_tokens_cuts_is_all_reasoning(thinker: openai.OpenAI) -> None:
    answer = thinker.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=3, extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    usage = answer.usage
    assert answer.choices[0].message.content == "" and answer.choices[0].finish_reason == "length"
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == usage.completion_tokens == 3


def test_calls_after_a_control_token_are_found(thinker: openai.OpenAI) -> None:
    marker = len(SPECIAL_TOKENS)  # [TOOL_CALLS]; it gets a bias, since a random model may also think until max_tokens
    found = thinker.chat.completions.create(**ask(tool_choice=NAMED, logit_bias={str(marker): 100})).choices[0]
    (call,) = found.message.tool_calls or ()
    assert found.finish_reason == "tool_calls"
    assert len(call.id) == 9 and call.id.isalnum(), "Mistral's template refuses other ids"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)  # type: ignore[union-attr]
    lark = f'start: "Hi. " <[{marker}]> "[{{\\"name\\": \\"clock\\", \\"arguments\\": {{}}}}]"'
    raw = {"extra_body": {"structured_outputs": {"grammar": lark}}}
    free = thinker.chat.completions.create(**ask(), **raw).choices[0]
    assert free.message.content == "Hi." and [c.function.name for c in free.message.tool_calls or ()] == ["clock"]


def test_a_model_without_a_form_of_calls_refuses_tools() -> None:
    template = ChatTemplate(source="{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
    _, tokenizer, _ = load()
    ready = Ready(
        tokenizer=tokenizer, chat=ChatEncoder(tokenizer, template), generates=True, max_model_len=512, vocab_size=320
    )
    with pytest.raises(ApiError, match="no known form of tool calls") as refused:
        parse(ChatBody, json.dumps(ask()).encode()).to_job(ready)
    assert refused.value.param == "tools" and "--tool-parser" in refused.value.hint
    job = parse(ChatBody, json.dumps(ask()).encode()).to_job(replace(ready, tool_parser="llama3"))
    assert job.format is not None and job.format.form is FORMS["llama3"]


def test_tools_too_large_for_a_grammar_are_refused() -> None:
    _, tokenizer, chat = load()
    ready = Ready(tokenizer=tokenizer, chat=chat, generates=True, max_model_len=10**6, vocab_size=320)
    properties = {f"p{i}": {"type": "string", "description": "x" * 200} for i in range(1300)}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}
    body = {"messages": ASK, "tools": [tool], "tool_choice": "required"}
    with pytest.raises(ApiError, match=r"has 3[0-9]{5} characters") as refused:
        parse(ChatBody, json.dumps(body).encode()).to_job(ready)
    assert (refused.value.status, refused.value.param) == (400, "tools") and "262144" in refused.value.hint


def test_a_chat_template_that_writes_nothing_is_an_error_of_the_request() -> None:
    _, tokenizer, _ = load()
    chat = ChatEncoder(tokenizer, ChatTemplate(source="{% if messages[0].content == 'go' %}go{% endif %}"))
    ready = Ready(tokenizer=tokenizer, chat=chat, generates=True, max_model_len=512, vocab_size=320)
    with pytest.raises(ApiError, match="the prompt is empty") as refused:
        parse(ChatBody, json.dumps({"messages": ASK}).encode()).to_job(ready)
    assert (refused.value.status, refused.value.param) == (400, "messages")
