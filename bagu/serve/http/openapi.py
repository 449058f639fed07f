"""The server's routes as data, and `/openapi.json` made of them: one list says what is routed and what is described.

The schemas of bodies are those of the models that check them (openai.py), with the limits of the model that is served
in place of those that hold for any: its names, its vocabulary, its longest sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import bagu
from bagu.serve.http import answers
from bagu.serve.http.openai import (
    MODEL_NAME,
    NUM_TOKENS,
    TOKEN_ID,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    TokenizeBody,
)
from bagu.serve.http.worker import Ready

__all__ = ["OPERATIONS", "Operation", "describe"]

STREAM = (
    'With "stream": true, server-sent events: `data: ` and a JSON object with `choices[].{piece}`, an `error` where '
    "the answer breaks off, `data: [DONE]` at the end."
)
READING = {
    400: "The body is wrong, or asks for what this server or model does not have; `param` is the field.",
    408: "The body took too long to arrive.",
    413: "The body is too large.",
    415: "The body does not say that it is JSON.",
}
NO_MODEL = {404: "There is no model of this name."}
NOT_READY = {503: "The model is loading, the engine is restarting, or the server is shutting down."}
QUEUE_FULL = {429: "The queue is full; Retry-After says when to come back."}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A route. `name` is the method of api.Api that answers it."""

    path: str
    name: str
    summary: str
    answer: type[BaseModel] | Literal["text/plain"]
    body: type[Body] | None = None
    description: str = ""
    failures: Mapping[int, str]
    parameters: Sequence[Mapping[str, Any]] = ()
    guarded: bool = False  # by the API key, where there is one
    needs: Literal["chat", "generation", "embedding"] | None = None  # of the model

    @property
    def method(self) -> str:
        return "GET" if self.body is None else "POST"

    def is_offered(self, ready: Ready | None) -> bool:
        """Whether the served model has what this needs; of a model that is loading nobody knows."""
        if self.needs is None or ready is None:
            return True
        if self.needs == "chat" and ready.chat is None:
            return False
        return ready.generates == (self.needs != "embedding")

    @property
    def route(self) -> str:
        """As Starlette writes it: a model's name may have slashes."""
        return self.path.replace("{name}", "{name:path}")


def _generates(
    path: str, name: str, summary: str, body: type[Body], answer: type[BaseModel], piece: str,
    needs: Literal["chat", "generation"],
) -> Operation:  # fmt: skip
    return Operation(
        path=path, name=name, summary=summary, body=body, answer=answer, description=STREAM.replace("{piece}", piece),
        failures={**READING, **NO_MODEL, **NOT_READY, **QUEUE_FULL}, guarded=True, needs=needs,
    )  # fmt: skip


def _reads(
    path: str, name: str, summary: str, body: type[Body], answer: type[BaseModel],
    needs: Literal["embedding"] | None = None,
) -> Operation:  # fmt: skip
    return Operation(
        path=path, name=name, summary=summary, body=body, answer=answer,
        failures={**READING, **NO_MODEL, **NOT_READY, **(QUEUE_FULL if needs else {})}, guarded=True, needs=needs,
    )  # fmt: skip


MODEL = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "format": MODEL_NAME}}
LAST = {
    "name": "last", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 0, "maximum": 10**9 - 1},
    "description": "Of how many of the last requests the median times are.",
}  # fmt: skip
OPERATIONS = (
    _generates(
        "/v1/chat/completions", "chat_completions", "Answer a chat", ChatBody, answers.ChatCompletion, "delta", "chat"
    ),
    _generates(
        "/v1/completions", "completions", "Continue a text", CompletionBody, answers.Completion, "text", "generation"
    ),
    _reads("/v1/embeddings", "embeddings", "Embed texts (encoders)", EmbeddingBody, answers.EmbeddingList, "embedding"),
    Operation(
        path="/v1/models", name="models", summary="The names of the served model", answer=answers.ModelList,
        failures={}, guarded=True,
    ),
    Operation(
        path="/v1/models/{name}", name="model", summary="One of them", answer=answers.Model, parameters=(MODEL,),
        failures=NO_MODEL, guarded=True,
    ),
    _reads("/tokenize", "tokenize", "Text or messages to token ids", TokenizeBody, answers.Tokenized),
    _reads("/detokenize", "detokenize", "Token ids to text", DetokenizeBody, answers.Detokenized),
    Operation(
        path="/health", name="health", summary="Whether the engine is ready and alive", answer=answers.Health,
        failures={503: "It is not; `reason` says why."},
    ),
    Operation(
        path="/metrics", name="metrics_text", summary="Counters and histograms for Prometheus", answer="text/plain",
        failures={},
    ),
    Operation(path="/version", name="version", summary="bagu's version", answer=answers.Version, failures={}),
    Operation(
        path="/engine", name="engine_stats", summary="The engine's state, as the page's panel shows it",
        answer=answers.EngineState, parameters=(LAST,),
        failures={400: "`last` is no count.", **NOT_READY},
    ),
)  # fmt: skip


def describe(names: Sequence[str], ready: Ready | None, *, has_key: bool) -> dict[str, Any]:
    """The OpenAPI document of a server of the model `names`; `ready` None while the model is loading."""
    offered = [o for o in OPERATIONS if o.is_offered(ready)]
    bodies = [o.body for o in offered if o.body is not None]
    replies = [o.answer for o in offered if not isinstance(o.answer, str)]
    models: list[Any] = [(model, "validation") for model in (*bodies, *replies, answers.Failure, answers.Unhealthy)]
    _, found = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas = found["$defs"]
    for body in bodies:
        _add_unsupported(schemas[body.__name__], body)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "bagu", "version": bagu.__version__,
            "description": "OpenAI's API with vLLM's extras. Fields that no schema names are ignored.",
        },
        "paths": {o.path: {o.method.lower(): _operation(o, has_key)} for o in offered},
        "components": {"schemas": schemas},
    }  # fmt: skip
    if has_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    _set_limits(document, names, ready)
    return document


def _operation(o: Operation, has_key: bool) -> dict[str, Any]:
    failures = {**o.failures, **({401: "The API key is missing or wrong."} if o.guarded and has_key else {})}
    found: dict[str, Any] = {
        "operationId": o.name, "summary": o.summary,
        "responses": {
            "200": {"description": "The answer.", "content": _content(o)},
            **{str(status): _failure(o, status, why) for status, why in sorted(failures.items())},
        },
    }  # fmt: skip
    if o.description:
        found["description"] = o.description
    if o.parameters:
        found["parameters"] = list(o.parameters)
    if o.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(o.body)}}}
    if o.guarded and has_key:
        found["security"] = [{"key": []}]
    return found


def _content(o: Operation) -> dict[str, Any]:
    if isinstance(o.answer, str):
        return {o.answer: {"schema": {"type": "string"}}}
    whole = {"application/json": {"schema": _ref(o.answer)}}
    return {**whole, "text/event-stream": {}} if o.description else whole  # 3.1 has no schema for events


def _failure(o: Operation, status: int, why: str) -> dict[str, Any]:
    kind = answers.Unhealthy if o.path == "/health" else answers.Failure
    found: dict[str, Any] = {"description": why, "content": {"application/json": {"schema": _ref(kind)}}}
    if status in (429, 503) and o.path != "/health":
        found["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}
    return found


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _add_unsupported(schema: dict[str, Any], body: type[Body]) -> None:
    """Fields of other servers, with the values that are taken; tools also beside `tool_choice: none`."""
    for name, harmless in body.unsupported.items():
        said: dict[str, Any] = {"description": "Not supported; taken where it asks for nothing.", "x-unsupported": True}
        if name not in ("tools", "functions"):
            said["enum"] = [None, *harmless]
        schema["properties"][name] = said


def _set_limits(node: Any, names: Sequence[str], ready: Ready | None) -> None:
    """Write the limits of the served model where a schema's format says that they hold."""
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _set_limits(child, names, ready)
    if not isinstance(node, dict) or node.get("format") not in (MODEL_NAME, TOKEN_ID, NUM_TOKENS):
        return
    kind = node.pop("format")
    if kind == MODEL_NAME:
        node["enum"] = list(names)
    elif ready is not None:
        node["maximum"] = ready.vocab_size - 1 if kind == TOKEN_ID else ready.max_model_len
