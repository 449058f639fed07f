"""The Responses API: the openai client and plain bodies against a real server, and the store's bounds."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any, Literal

import openai
import pydantic
import pytest
from api_client import HEADERS, post
from tiny_server import MODEL, Running

from bagu.serve.http.errors import ApiError
from bagu.serve.http.openapi.schemas import ModelResponse
from bagu.serve.http.responses_api.items import input_messages
from bagu.serve.http.responses_api.store import ResponseStore, StoredResponse

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Köln", "Rome"]}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}


def ask(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "hello", "max_output_tokens": 400, **fields}


def choice(*words: str) -> dict[str, Any]:
    """A format that admits exactly these texts, as JSON strings."""
    return {"format": {"type": "json_schema", "name": "words", "schema": {"enum": list(words)}, "strict": True}}


def test_text_in_text_out(client: openai.OpenAI, tiny: Running) -> None:
    found = client.responses.create(**ask(text=choice("hi"), instructions="be brief", metadata={"a": "b"}))
    assert (found.output_text, found.status, found.model) == ('"hi"', "completed", MODEL)
    assert found.usage is not None and found.usage.total_tokens == found.usage.input_tokens + found.usage.output_tokens
    assert found.metadata == {"a": "b"} and found.instructions == "be brief"
    assert {"reasoning", "user", "service_tier"} <= found.model_dump(exclude_unset=True).keys()
    cut = post(tiny, PATH, {"input": "hello", "max_output_tokens": 2, "ignore_eos": True})
    body = ModelResponse.model_validate_json(cut.content)
    assert body.status == "incomplete" and body.output[0].status == "incomplete" and body.usage.output_tokens == 2
    assert cut.json()["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_openai_client_calls_and_finishes(client: openai.OpenAI, stream: bool) -> None:
    """The model is random and may answer at once; a call has a probability of about 1/3 in each turn."""
    runners = pytest.importorskip("openai.lib.responses_tool_runner")
    cities: list[object] = []

    def weather(arguments: dict[str, object]) -> str:
        cities.append(arguments["city"])
        return "sunny"

    strict = {**WEATHER, "parameters": {**PARAMETERS, "additionalProperties": False}}
    fields = ask(text=choice("hi"), parallel_tool_calls=False)  # the runner adds the tools
    for _ in range(100):
        runner = runners.ResponsesToolRunner(functions=[runners.RegisteredFunction(strict, weather)])
        final = runner.run(client, fields, max_steps=50, stream=stream)
        assert (final.status, final.output_text) == ("completed", '"hi"')
        if cities:
            break
    assert cities and set(cities) <= {"Köln", "Rome"}


def test_the_conversation_goes_on_from_the_previous_response(client: openai.OpenAI, tiny: Running) -> None:
    first = client.responses.create(**ask(text=choice("hi")))
    second = client.responses.create(**ask(input="and then?", previous_response_id=first.id, text=choice("so")))
    turns = [("user", "hello"), ("assistant", '"hi"'), ("user", "and then?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    assert second.usage is not None
    assert second.usage.input_tokens == tokens(tiny, messages)
    third = client.responses.create(**ask(previous_response_id=second.id, instructions="be", text=choice("x")))
    messages = [{"role": "system", "content": "be"}, *messages, {"role": "assistant", "content": '"so"'}]
    assert third.usage is not None
    assert third.usage.input_tokens == tokens(tiny, [*messages, {"role": "user", "content": "hello"}])


def tokens(tiny: Running, messages: list[Any]) -> int:
    """The number of tokens of a prompt with these messages."""
    answer = post(tiny, "/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    return int(answer["usage"]["prompt_tokens"])


def test_responses_are_kept_until_they_are_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(**ask(text=choice("hi")))
    assert client.responses.retrieve(made.id) == made
    client.responses.delete(made.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            call(made.id)
    unstored = client.responses.create(**ask(store=False, text=choice("hi")))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.create(**ask(previous_response_id=unstored.id))


def test_a_streamed_text_has_the_events_of_openais_api_in_order(client: openai.OpenAI) -> None:
    fields = ask(text=choice("hello"), store=False)
    events = list(client.responses.create(**fields, stream=True))
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * deltas, "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == '"hello"' == events[-1].response.output_text  # type: ignore[union-attr]
    with client.responses.stream(**fields) as stream:
        assert [event.type for event in stream] == kinds
        assert stream.get_final_response().output_text == text


def test_curl_streams_a_response(tiny: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    command = [
        curl,
        "-sSN",
        "--max-time",
        "60",
        f"{tiny.url}{PATH}",
        "-d",
        json.dumps(ask(text=choice("hi"), stream=True)),
    ]
    command += [word for name, value in HEADERS.items() for word in ("-H", f"{name}: {value}")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith('event: response.created\ndata: {"type":"response.created","sequence_number":0,')
    *_, last = said.strip().split("\n\n")
    kind, data = last.split("\n")
    assert kind == "event: response.completed"
    response = json.loads(data.removeprefix("data: "))["response"]
    assert response["output"][0]["content"][0]["text"] == '"hi"'


def test_function_calls_and_their_outputs(client: openai.OpenAI, tiny: Running) -> None:
    fields = ask(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_output_tokens=200)
    made = client.responses.create(**fields)
    (call,) = made.output
    assert call.type == "function_call" and json.loads(call.arguments)["city"] in ("Köln", "Rome")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    again = client.responses.create(**ask(input=[output], previous_response_id=made.id, text=choice("fine")))
    whole = [{"role": "user", "content": "hello"}, call.model_dump(exclude_none=True), output]
    same = client.responses.create(**ask(input=whole, text=choice("fine")))
    assert again.usage is not None and same.usage is not None
    assert again.usage.input_tokens == same.usage.input_tokens and again.output_text == '"fine"'

    named = {**fields, "tool_choice": {"type": "function", "name": "get_weather"}}
    kinds = [event.type for event in client.responses.create(**named, stream=True)]
    deltas = kinds.count("response.function_call_arguments.delta")
    assert deltas > 2 and kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        *["response.function_call_arguments.delta"] * deltas, "response.function_call_arguments.done",
        "response.output_item.done", "response.completed",
    ]  # fmt: skip


class City(pydantic.BaseModel, frozen=True):
    """A tool of the client's helpers."""

    name: Literal["Köln", "Rome"]


def test_the_helpers_of_the_openai_client_parse(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(**ask(text_format=City))
    assert isinstance(parsed.output_parsed, City)
    tools = [openai.pydantic_function_tool(City)]
    fields = ask(tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = client.responses.parse(**{**fields, "max_output_tokens": 200}).output
    assert call.type == "function_call" and isinstance(call.parsed_arguments, City)
    with client.responses.stream(**ask(text_format=City)) as stream:
        assert isinstance(stream.get_final_response().output_parsed, City)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_openai_client_runs_to_the_answer(client: openai.OpenAI, stream: bool) -> None:
    """The model writes one of two texts, a call or the answer."""
    runner = pytest.importorskip("openai.lib.responses_tool_runner")
    tools = pytest.importorskip("openai.lib._tools")
    cities: list[City] = []

    def execute(city: City) -> str:
        cities.append(city)
        return "sunny"

    call = '<tool_call>\n{"name": "City", "arguments": {"name": "Rome"}}\n</tool_call>'
    function = runner.RegisteredFunction.from_tool(tools.pydantic_responses_function_tool(City), execute=execute)
    extra = {"structured_outputs": {"choice": [call, "Done."]}}  # about as likely: one of 40 runs begins with a call
    for _ in range(40):
        final = runner.ResponsesToolRunner(functions=[function]).run(
            client, ask(extra_body=extra, max_output_tokens=200), max_steps=30, stream=stream
        )
        assert final.output_text == "Done."
        if cities:
            break
    assert cities and set(cities) == {City(name="Rome")}


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": 5}, 400, "input"), ({"input": []}, 400, "input"), ({"input": ""}, 400, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input.0.type"),
        ({"input": [{"role": "tool", "content": "x"}]}, 400, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input.0.content.0"),
        ({"input": [{"type": "function_call", "name": "", "call_id": "", "arguments": "["}]}, 400, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, 400, "input.0.call_id"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.name"),
        ({"tools": [WEATHER, WEATHER]}, 400, "tools.1.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}}, 400, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
        ({"text": choice()}, 400, "text.format"),
        ({"max_output_tokens": 10**6}, 400, "max_output_tokens"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        ({"background": True}, 400, "background"), ({"reasoning": {"effort": "low"}}, 400, "reasoning"),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"), ({"model": "gpt-9"}, 404, "model"),
    ],
)  # fmt: skip
def test_wrong_bodies_are_refused_with_the_field(
    tiny: Running, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = post(tiny, PATH, {"input": "hello", "max_output_tokens": 2, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


def test_a_response_echoes_only_the_text_options_that_have_an_effect(tiny: Running) -> None:
    text = {"format": {"type": "text", "schema": {"a": 1}}, "other": "x" * 1000}
    answer = post(tiny, PATH, {"input": "hello", "max_output_tokens": 2, "text": text, "user": "y" * 1000})
    assert answer.json()["text"] == {"format": {"type": "text"}}
    assert answer.json()["user"] is None


def test_items_become_messages_with_reasoning_and_calls() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "well"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "look"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ]
    user, assistant, tool = input_messages(items)
    assert user == {"role": "user", "content": "a\nb"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("look", "well")
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["f", "g"]
    assert tool == {"role": "tool", "tool_call_id": "1", "content": "x"}


def test_the_store_keeps_the_last_used_responses_within_its_bounds() -> None:
    def response(id: str, size: int = 0) -> StoredResponse:
        return StoredResponse(owner=b"k", body={"id": id}, messages=[{"role": "user", "content": "x" * size}])

    store = ResponseStore(max_responses=2, max_bytes=1000)
    for id in ("a", "b"):
        store.put(response(id))
    store.get(b"k", "a")
    store.put(response("c"))
    with pytest.raises(ApiError) as missing:  # the least recently used one is gone
        store.get(b"k", "b", "previous_response_id")
    assert (missing.value.status, missing.value.param) == (404, "previous_response_id")
    store.put(response("d", 940))
    assert len(store) == 1 and store.get(b"k", "d") and store.bytes <= 1000
    store.put(response("e", 2000))  # larger than the whole store
    assert len(store) == 0 and store.bytes == 0
    store.put(response("f"))
    store.delete(b"k", "f")
    assert len(store) == 0 and store.bytes == 0
