"""Structured output over HTTP: the openai client and plain bodies against a real server process."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from api_client import ASK, CHAT, TEXT, post
from tiny_server import MODEL, Running

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "b"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "point", "strict": True, "schema": POINT}}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    age: int = pydantic.Field(ge=0, le=150)
    mood: Literal["calm", "cross"]
    tags: list[Literal["x", "y"]] = pydantic.Field(max_length=3)


def test_parse_of_the_openai_client_returns_the_pydantic_model(client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Person, max_tokens=200, seed=seed
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"


def test_a_streamed_schema_is_the_same_text(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL, "messages": ASK, "seed": 4, "max_tokens": 100, "response_format": JSON_SCHEMA, "n": 2,
    }  # fmt: skip
    whole = [c.message.content for c in client.chat.completions.create(**ask).choices]
    parts = ["", ""]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == whole
    for text in parts:
        jsonschema.validate(json.loads(text), POINT)


def test_the_stream_helper_of_the_openai_client_parses(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=Person, max_tokens=200, seed=5
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)


ONES = {"type": "array", "items": {"const": 1}, "minItems": 9, "maxItems": 9}


@pytest.mark.parametrize(
    ("asked", "valid"),
    [
        ({"json": POINT}, lambda text: jsonschema.validate(json.loads(text), POINT) is None),
        ({"json": {"const": {"a": [1, 2]}}}, lambda text: text == '{"a": [1, 2]}'),
        ({"json": ONES, "whitespace_pattern": "[\t]"}, lambda text: json.loads(text) == [1] * 9 and "\t" in text),
        ({"json": json.dumps(POINT)}, lambda text: jsonschema.validate(json.loads(text), POINT) is None),
        ({"regex": "[0-9]{3}-[a-f]{2}"}, lambda text: len(text) == 6 and text[:3].isdigit() and text[3] == "-"),
        ({"choice": ["yes", "no", "你好 \"quoted\"\n"]}, lambda text: text in ("yes", "no", "你好 \"quoted\"\n")),
        ({"choice": [str(i) for i in range(3000)]}, lambda text: text.isdecimal() and int(text) < 3000),
        ({"grammar": 'start: "a" ("b" | "c") "d"'}, lambda text: text in ("abd", "acd")),
        ({"grammar": 'root ::= "a" ("b" | "c") "d"'}, lambda text: text in ("abd", "acd")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_structured_outputs_constrain_chats_and_completions(tiny: Running, path: str, asked: Any, valid: Any) -> None:
    prompt = {"messages": ASK} if path == CHAT else {"prompt": "hello"}
    answer = post(tiny, path, {**prompt, "structured_outputs": asked, "max_tokens": 100, "seed": 1})
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert valid(text) and choice["finish_reason"] == "stop", text


def test_a_json_object_is_an_object(tiny: Running) -> None:
    """A random model may go on to max_tokens; what it writes until then is the beginning of an object."""
    asked = {"response_format": {"type": "json_object"}, "max_tokens": 60, "temperature": 0.7, "seed": 3}
    answer = post(tiny, CHAT, {"messages": ASK, **asked}).json()["choices"][0]
    assert answer["message"]["content"].startswith("{")
    assert answer["finish_reason"] == "length" or isinstance(json.loads(answer["message"]["content"]), dict)


def test_text_is_free(tiny: Running) -> None:
    body = {"prompt": "a", "max_tokens": 5, "seed": 1}
    free = post(tiny, TEXT, body).json()["choices"]
    assert post(tiny, TEXT, {**body, "response_format": {"type": "text"}}).json()["choices"] == free


DEEP: Any = {}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}
RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'
REFUSED: dict[str, tuple[str, Any, str]] = {
    "not a schema": ("json", {"type": "nothing"}, "Invalid type"),
    "not JSON": ("json", "{", "not JSON"),
    "not a schema but a list": ("json", "[]", "a schema is a JSON object"),
    "unsupported keyword": ("json", {"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contradiction": ("json", {"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
    "endless recursion": (
        "json",
        {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        "recurses without end",
    ),
    "a reference to itself": ("json", {"$ref": "#"}, "recurses without end"),
    "nested deeply": ("json", json.dumps(DEEP), "recursion limit"),  # as text: a body has 128 levels at most
    "a chain that overflows the stack": ("json", {"$ref": "#/$defs/d0", "$defs": CHAIN}, "nested too deeply"),
    "a regex that is none": ("regex", "([", "unclosed"),
    "a regex that matches nothing": ("regex", r"[^\s\S]", "no finite text"),
    "rules that overflow the stack": ("grammar", RULES, "nested too deeply, or too large"),
    "a rule that is missing": ("grammar", "start: x", "unknown name"),
    "a rule that repeats for ever": ("grammar", 'start: "a" start', "Too many items"),
    "a rule with too many alternatives": (
        "grammar",
        "start: " + " | ".join(f'"{i}"' for i in range(2100)),
        "max is 2000",
    ),
    "5 MB": ("grammar", "start: " + '"a" ' * (5 * 2**18), "at most 262144"),
    "no choice": ("choice", [], "one or more"),
    "an empty choice": ("choice", [""], "one or more"),
    "a wrong type": ("regex", 5, "regex"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_grammar_is_refused_before_anything_is_queued(tiny: Running, name: str, stream: bool) -> None:
    field, value, message = REFUSED[name]
    body = {"prompt": "a", "max_tokens": 5, "structured_outputs": {field: value}, "stream": stream}
    answer = post(tiny, TEXT, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), answer.text
    assert error["param"].startswith("structured_outputs") and message in error["message"], answer.text
    state = tiny.get("/engine")
    assert (state["running"], state["waiting"], state["blocks"]["used"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "sets nothing"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "regex and choice"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs", "is for JSON"),
        ({"structured_outputs": {"json": True, "whitespace_pattern": "("}}, "structured_outputs", "cannot be compiled"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "not supported"),
        ({"structured_outputs": {"regex": "a"}, "response_format": JSON_SCHEMA}, "structured_outputs", "both"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema.schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'json_object'"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "thing"}}}},
            "response_format",
            "Invalid type",
        ),
    ],
)
def test_contradicting_fields_are_refused(tiny: Running, body: Any, param: str, message: str) -> None:
    answer = post(tiny, TEXT, {"prompt": "a", "max_tokens": 5, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), answer.text
    assert message in error["message"], answer.text


def test_metrics_count_constrained_requests(tiny: Running) -> None:
    def count(name: str) -> float:
        lines = tiny.http.get("/metrics").text.splitlines()
        (line,) = (line for line in lines if line.startswith(f"bagu:{name}"))
        return float(line.rsplit(" ", 1)[1])

    names = ["constrained_requests_total", "grammar_mask_seconds_total", "grammar_mask_wait_seconds_total"]
    before = [count(name) for name in names]
    assert post(tiny, TEXT, {"prompt": "a", "structured_outputs": {"choice": ["yes", "no"]}}).status_code == 200
    after = [count(name) for name in names]
    assert after[0] == before[0] + 1 and after[1] > before[1] and after[2] > before[2]
    assert count("grammar_compilations_total") > 0 and count("grammar_compile_seconds_total") > 0
