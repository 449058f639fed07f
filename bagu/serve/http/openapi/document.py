"""The routes as data, and `/openapi.json` generated from them: one list for routing and documentation.

The schemas of request bodies come from the pydantic models that validate them (bodies/), with the limits of the
loaded model filled in: its names, vocabulary size and longest sequence.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import bagu
from bagu.serve.http.adapter_routes import LoadAdapterBody, UnloadAdapterBody
from bagu.serve.http.bodies.chat import ChatBody
from bagu.serve.http.bodies.openai import MODEL_NAME, NUM_TOKENS, TOKEN_ID, Body, CompletionBody, EmbeddingBody
from bagu.serve.http.bodies.scores import RerankBody, ScoreBody
from bagu.serve.http.bodies.tokens import DetokenizeBody, TokenizeBody
from bagu.serve.http.files_api.bodies import PURPOSES
from bagu.serve.http.openapi import schemas
from bagu.serve.http.openapi.files import FILE_OPERATIONS
from bagu.serve.http.openapi.operation import NO_MODEL, NOT_READY, QUEUE_FULL, READING, Operation
from bagu.serve.http.responses_api.body import ResponsesBody
from bagu.serve.wire.messages import Ready

STREAM = (
    'With "stream": true, server-sent events: `data: ` and a JSON object with `choices[].{piece}`, or with `error` if '
    "the generation fails; `data: [DONE]` at the end."
)
RESPONSE_STREAM = (
    'With "stream": true, server-sent events of OpenAI\'s Responses API: `event: ` and its type, `data: ` and a JSON '
    "object with `type` and `sequence_number`; `response.completed` or `response.incomplete` at the end."
)
NO_RESPONSE = {404: "There is no response of this id in memory."}
NO_LOADING = "The server was started without --adapter-root."


def _generates(
    path: str,
    name: str,
    summary: str,
    body: type[Body],
    answer: type[BaseModel],
    piece: str,
    needs: Literal["chat", "generation"],
) -> Operation:
    return Operation(
        path=path,
        name=name,
        method="POST",
        summary=summary,
        body=body,
        answer=answer,
        description=STREAM.replace("{piece}", piece),
        failures={**READING, **NO_MODEL, **NOT_READY, **QUEUE_FULL},
        access="key",
        needs=needs,
    )


def _reads(
    path: str,
    name: str,
    summary: str,
    body: type[Body],
    answer: type[BaseModel],
    needs: Literal["embedding", "scoring"] | None = None,
) -> Operation:
    return Operation(
        path=path,
        name=name,
        method="POST",
        summary=summary,
        body=body,
        answer=answer,
        failures={**READING, **NO_MODEL, **NOT_READY, **QUEUE_FULL},
        access="key",
        needs=needs,
    )


MODEL = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "format": MODEL_NAME}}
LAST = {
    "name": "last",
    "in": "query",
    "required": False,
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**9 - 1},
    "description": "Number of most recent requests for the median times.",
}
ENGINE_OF = {
    "name": "model",
    "in": "query",
    "required": False,
    "schema": {"type": "string", "format": MODEL_NAME},
    "description": "The model of a repository; the default is the first.",
}
FORM = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": list(PURPOSES)}},
}
RESPONSE_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
OPERATIONS = (
    _generates(
        "/v1/chat/completions", "chat_completions", "Complete a chat", ChatBody, schemas.ChatCompletion, "delta", "chat"
    ),
    _generates(
        "/v1/completions", "completions", "Complete a text", CompletionBody, schemas.Completion, "text", "generation"
    ),
    Operation(
        path="/v1/responses", name="create_response", method="POST", body=ResponsesBody, answer=schemas.ModelResponse,
        summary="Create a response (OpenAI's Responses API)", description=RESPONSE_STREAM, access="key", needs="chat",
        failures={**READING, 404: "There is no such model, or no such response.", **NOT_READY, **QUEUE_FULL},
    ),
    Operation(
        path="/v1/responses/{id}", name="get_response", summary="Get a stored response", answer=schemas.ModelResponse,
        parameters=(RESPONSE_ID,), failures=NO_RESPONSE, access="key", needs="chat",
    ),
    Operation(
        path="/v1/responses/{id}", name="delete_response", method="DELETE", summary="Delete a stored response",
        answer=schemas.DeletedResponse, parameters=(RESPONSE_ID,), failures=NO_RESPONSE, access="key", needs="chat",
    ),
    *FILE_OPERATIONS,
    _reads("/v1/embeddings", "embeddings", "Embed texts (encoders)", EmbeddingBody, schemas.EmbeddingList, "embedding"),
    _reads("/v1/score", "score", "Score pairs of texts", ScoreBody, schemas.ScoreList, "scoring"),
    _reads("/v1/rerank", "rerank", "Sort documents by relevance to a query", RerankBody, schemas.Reranked, "scoring"),
    Operation(
        path="/v1/load_lora_adapter", name="load_adapter", method="POST", body=LoadAdapterBody, answer="text/plain",
        summary="Load a LoRA adapter from a folder of the server", needs="adapters", access="admin",
        failures={**READING, 403: NO_LOADING, **NOT_READY},
    ),
    Operation(
        path="/v1/unload_lora_adapter", name="unload_adapter", method="POST", body=UnloadAdapterBody,
        answer="text/plain", summary="Unload a LoRA adapter; requests that use it finish", needs="adapters",
        access="admin", failures={**READING, 403: NO_LOADING, 404: "There is no adapter of this name.", **NOT_READY},
    ),
    Operation(
        path="/v1/models", name="models", summary="List the names of the model", answer=schemas.ModelList,
        failures={}, access="key",
    ),
    Operation(
        path="/v1/models/{name}", name="model", summary="Get one model", answer=schemas.Model, parameters=(MODEL,),
        failures=NO_MODEL, access="key",
    ),
    _reads("/tokenize", "tokenize", "Text or messages to token ids", TokenizeBody, schemas.Tokenized),
    _reads("/detokenize", "detokenize", "Token ids to text", DetokenizeBody, schemas.Detokenized),
    Operation(
        path="/health", name="health", summary="Whether the engine is ready and alive", answer=schemas.Health,
        failures={503: "The engine is not ready or not alive; see `reason`."}, access="open",
    ),
    Operation(
        path="/metrics", name="metrics_text", summary="Counters and histograms for Prometheus", answer="text/plain",
        failures={}, access="metrics",
    ),
    Operation(
        path="/version", name="version", summary="bagu's version", answer=schemas.Version, failures={}, access="open",
    ),
    Operation(
        path="/engine", name="engine_stats", summary="The engine's state, for the engine panel of the chat page",
        answer=schemas.EngineState, parameters=(LAST, ENGINE_OF),
        failures={400: "`last` is not a number.", **NO_MODEL, **NOT_READY}, access="metrics",
    ),
)  # fmt: skip


def describe(
    names: Sequence[str], ready: Ready | None, *, has_key: bool, operations: Sequence[Operation] = OPERATIONS
) -> dict[str, Any]:
    """The OpenAPI document of a server whose models have these names, as far as the reader may see them; `ready` is
    None while the model is loading."""
    offered = [o for o in operations if o.is_offered(ready)]
    bodies = [o.body for o in offered if o.body is not None]
    responses = [o.answer for o in offered if not isinstance(o.answer, str)]
    models: list[Any] = [(model, "validation") for model in (*bodies, *responses, schemas.Failure, schemas.Unhealthy)]
    _, found = models_json_schema(models, ref_template="#/components/schemas/{model}")
    definitions = found["$defs"]
    for body in bodies:
        _add_unsupported(definitions[body.__name__], body)
    paths: dict[str, dict[str, Any]] = {}
    for o in offered:
        paths.setdefault(o.path, {})[o.method.lower()] = _operation(o, has_key)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "bagu",
            "version": bagu.__version__,
            "description": "The OpenAI API with vLLM's extra parameters. Fields that are in no schema are ignored.",
        },
        "paths": paths,
        "components": {"schemas": definitions},
    }
    if has_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    _set_limits(document, names, ready)
    return document


def _operation(o: Operation, has_key: bool) -> dict[str, Any]:
    failures = dict(o.failures)
    if o.access != "open" and has_key:
        failures |= {401: "The API key is missing or wrong."}
        if o.method == "POST" or o.access == "metrics" or MODEL in o.parameters:
            failures = {403: "The API key may not do this."} | failures
    found: dict[str, Any] = {
        "operationId": o.name,
        "summary": o.summary,
        "responses": {
            "200": {"description": "The response.", "content": _content(o)},
            **{str(status): _failure(o, status, why) for status, why in sorted(failures.items())},
        },
    }
    if o.description:
        found["description"] = o.description
    if o.parameters:
        found["parameters"] = list(o.parameters)
    if o.body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(o.body)}}}
    if o.form:
        found["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}
    if o.access != "open" and has_key:
        found["security"] = [{"key": []}]
    return found


def _content(o: Operation) -> dict[str, Any]:
    if isinstance(o.answer, str):
        return {o.answer: {"schema": {"type": "string"}}}
    whole = {"application/json": {"schema": _ref(o.answer)}}
    return {**whole, "text/event-stream": {}} if o.description else whole  # 3.1 has no schema for events


def _failure(o: Operation, status: int, why: str) -> dict[str, Any]:
    kind = schemas.Unhealthy if o.path == "/health" else schemas.Failure
    found: dict[str, Any] = {"description": why, "content": {"application/json": {"schema": _ref(kind)}}}
    if status in (429, 503) and o.path != "/health":
        found["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}
    return found


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _add_unsupported(schema: dict[str, Any], body: type[Body]) -> None:
    """Add the fields of other servers with their accepted values; functions are also accepted with
    `function_call: none`."""
    for name, accepted in body.unsupported.items():
        field: dict[str, Any] = {"description": "Not supported; only the listed values.", "x-unsupported": True}
        if name != "functions":
            field["enum"] = [None, *accepted]
        schema["properties"][name] = field


def _set_limits(node: Any, names: Sequence[str], ready: Ready | None) -> None:
    """Replace the formats MODEL_NAME, TOKEN_ID and NUM_TOKENS with the limits of the model."""
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        _set_limits(child, names, ready)
    if not isinstance(node, dict) or node.get("format") not in (MODEL_NAME, TOKEN_ID, NUM_TOKENS):
        return
    kind = node.pop("format")
    if kind == MODEL_NAME:
        node |= {"enum": list(names)} if names else {}
    elif ready is not None:
        node["maximum"] = ready.vocab_size - 1 if kind == TOKEN_ID else ready.max_model_len
