"""`/openapi.json` and `/docs` of a real server: every route, the limits of the model, and the responses."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tiny_server import KEY, MAX_LEN, MODEL, Running

from bagu.serve.http.openapi.document import OPERATIONS, describe
from bagu.serve.http.responses_api.body import SHARED

HEADERS = {"Authorization": f"Bearer {KEY}"}
ASK = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def document(tiny: Running) -> dict[str, Any]:
    found: dict[str, Any] = tiny.http.get("/openapi.json", headers=HEADERS).json()
    return found


def test_every_operation_is_routed(tiny: Running, document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for method in item:
            answer = tiny.http.request(method, path.replace("{name}", MODEL), headers=HEADERS)
            assert str(answer.status_code) in item[method]["responses"], (path, answer.text)
            other = tiny.http.request("PUT", path.replace("{name}", MODEL), headers=HEADERS)
            assert other.status_code == 405
            assert set(other.headers["allow"].split(", ")) - {"HEAD"} == {name.upper() for name in item}


def test_routes_that_the_model_does_not_support_are_left_out(document: dict[str, Any]) -> None:
    assert "/v1/embeddings" not in document["paths"] and "/v1/chat/completions" in document["paths"]


def test_every_guarded_route_declares_its_key(tiny: Running, document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            answer = tiny.http.request(method, path.replace("{name}", MODEL))
            assert (answer.status_code == 401) == ("security" in operation), path


def test_the_schemas_have_the_limits_of_the_model(tiny: Running, document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    chat = schemas["ChatBody"]["properties"]
    assert chat["model"]["anyOf"][0]["enum"] == [MODEL]
    assert chat["max_tokens"]["anyOf"][0]["maximum"] == MAX_LEN
    assert chat["n"]["anyOf"][0] == {"minimum": 1, "maximum": 128, "type": "integer"}
    assert chat["top_p"]["anyOf"][0] == {"exclusiveMinimum": 0, "maximum": 1, "type": "number"}
    assert chat["guided_choice"]["enum"] == [None] and chat["repeat_penalty"]["enum"] == [None, 1, 1.0]
    loading = describe([MODEL], None, has_key=True)["components"]["schemas"]["ChatBody"]["properties"]
    assert loading["max_tokens"]["anyOf"][0]["maximum"] == 2**63 - 1
    largest = schemas["DetokenizeBody"]["properties"]["tokens"]["items"]["maximum"]
    ask = {"prompt": [largest], "max_tokens": 1}
    assert tiny.http.post("/v1/completions", json=ask, headers=HEADERS).status_code == 200
    ask["prompt"] = [largest + 1]
    assert tiny.http.post("/v1/completions", json=ask, headers=HEADERS).status_code == 400


def test_a_response_has_the_limits_of_the_chat_that_it_becomes() -> None:
    schemas = describe([MODEL], None, has_key=False)["components"]["schemas"]
    chat, response = (schemas[body]["properties"] for body in ("ChatBody", "ResponsesBody"))
    for name in SHARED:
        assert response[name]["anyOf"] == chat[name]["anyOf"], name


ASKED: dict[str, tuple[str, Any]] = {
    "chat_completions": ("/v1/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 2, "n": 2}),
    "completions": ("/v1/completions", {"prompt": "hello", "logprobs": 1, "echo": True, "prompt_logprobs": 1}),
    "create_response": ("/v1/responses", {"input": "hello", "max_output_tokens": 3}),
    "models": ("/v1/models", None),
    "model": (f"/v1/models/{MODEL}", None),
    "tokenize": ("/tokenize", {"messages": ASK}),
    "detokenize": ("/detokenize", {"tokens": [5, 6]}),
    "health": ("/health", None),
    "version": ("/version", None),
    "engine_stats": ("/engine", None),
}


@pytest.mark.parametrize("name", ASKED)
def test_responses_match_their_schemas(tiny: Running, name: str) -> None:
    (operation,) = (o for o in OPERATIONS if o.name == name)
    path, body = ASKED[name]
    if body is None:
        answer = tiny.http.get(path, headers=HEADERS)
    else:
        generates = {"max_tokens": 3} if path.endswith("completions") else {}
        answer = tiny.http.post(path, json={**body, **generates}, headers=HEADERS)
    assert answer.status_code == 200 and not isinstance(operation.answer, str)
    operation.answer.model_validate_json(answer.content, strict=True)


def test_the_page_shows_every_route_and_fetches_nothing(tiny: Running, document: dict[str, Any]) -> None:
    answer = tiny.http.get("/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in document["paths"]:
        assert f"<code>{path}</code>" in answer.text
    assert not re.search(r"<script|<link|<img|src=|https?://", answer.text)
    assert f"≤ {MAX_LEN}" in answer.text and "<code>guided_choice</code>" in answer.text
