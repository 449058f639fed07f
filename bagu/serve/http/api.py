"""The HTTP routes: the OpenAI API, health and metrics for operators, and the chat page.

Waiting for the engine never blocks the event loop.
"""

import asyncio
import base64
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

import bagu
from bagu.serve.http.adapter_routes import AdapterRoutes
from bagu.serve.http.bodies.chat import ChatBody, ChatWithPassages
from bagu.serve.http.bodies.openai import CompletionBody, EmbeddingBody
from bagu.serve.http.bodies.parse import parse
from bagu.serve.http.bodies.tokens import DetokenizeBody, TokenizeBody
from bagu.serve.http.calls import ApiMiddleware, cancel_on_disconnect, error_response, json_response
from bagu.serve.http.errors import ApiError, UnknownModel
from bagu.serve.http.instances import Caller
from bagu.serve.http.keys import Access, Keys
from bagu.serve.http.observe.metrics import CONTENT_TYPE, KEPT, Metrics
from bagu.serve.http.openapi import reference
from bagu.serve.http.openapi.document import OPERATIONS, describe
from bagu.serve.http.openapi.operation import Operation
from bagu.serve.http.parsed_response import chat_response
from bagu.serve.http.responses import CompletionResponse
from bagu.serve.http.responses_api.routes import ResponsesRoutes
from bagu.serve.http.routes import LARGE_BODY, key_of, user_of
from bagu.serve.http.score_routes import ScoreRoutes
from bagu.serve.page import HEADERS, Asset, assets
from bagu.serve.stats import EngineStats

Endpoint = Callable[[Request], Awaitable[Response]]


class CountedRoute(Route):
    """A route that adds itself to the scope, where `ApiMiddleware` reads it to count requests per route. FastAPI does
    this only for its own APIRoute."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}


class Api(ResponsesRoutes, ScoreRoutes, AdapterRoutes):
    """The endpoints; each returns a response or raises ApiError."""

    operations: Sequence[Operation] = OPERATIONS

    async def chat_completions(self, request: Request) -> Response:
        self.catalog.check_ready()
        raw = await self.read(request)
        body = parse(ChatBody, raw)
        turn = None
        if body.file_search is not None:
            question, earlier = body.question()
            turn = await self.find_turn(request, body.file_search, question, earlier, "file_search.")
        given = body if turn is None else ChatWithPassages(body, turn)
        respond = partial(chat_response, turn=turn)
        large = await self.find_images(request, body.messages) or len(raw) > LARGE_BODY
        return await self.run_generation(request, given, respond, large=large, user=user_of(body))

    async def completions(self, request: Request) -> Response:
        self.catalog.check_ready()
        raw = await self.read(request)
        body = parse(CompletionBody, raw)
        large = len(raw) > LARGE_BODY
        return await self.run_generation(request, body, CompletionResponse, large=large, user=user_of(body))

    async def embeddings(self, request: Request) -> Response:
        self.catalog.check_ready()
        raw = await self.read(request)
        body = parse(EmbeddingBody, raw)
        instance = await self.find(request, body.model)
        ready = instance.engine.require_ready()
        with instance.engine.pending.embedding_call():
            texts = await asyncio.to_thread(body.texts, ready) if len(raw) > LARGE_BODY else body.texts(ready)
            vectors = await cancel_on_disconnect(instance.engine.embed(texts), request.receive)
        encode = _base64 if body.encoding_format == "base64" else list
        data = [{"object": "embedding", "index": i, "embedding": encode(v)} for i, v in enumerate(vectors)]
        count = sum(map(len, texts))
        self.charge(request, count)
        usage = {"prompt_tokens": count, "total_tokens": count}
        return json_response({"object": "list", "data": data, "model": instance.name, "usage": usage})

    async def models(self, request: Request) -> Response:
        names = self.visible(request)
        return json_response({"object": "list", "data": [self._model(name, names) for name in names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.check_model(request, name)
        return json_response(self._model(name, self.visible(request)))

    async def tokenize(self, request: Request) -> Response:
        self.catalog.check_ready()
        raw = await self.read(request)
        body = parse(TokenizeBody, raw)
        ready = (await self.find(request, body.model)).engine.require_ready()
        ids = await asyncio.to_thread(body.ids, ready) if len(raw) > LARGE_BODY else body.ids(ready)
        return json_response({"tokens": ids, "count": len(ids), "max_model_len": ready.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        self.catalog.check_ready()
        body = parse(DetokenizeBody, await self.read(request))
        ready = (await self.find(request, body.model)).engine.require_ready()
        return json_response({"prompt": body.text(ready)})

    async def health(self, request: Request) -> Response:
        """200 if the engine is ready and makes progress; otherwise 503 with the reason."""
        reason, replicas = self.catalog.unhealthy_reason(), self.catalog.describe()
        more = {"replicas": replicas} if replicas else {}
        if reason is None:
            return json_response({"status": "ok", **more})
        return json_response({"status": "unhealthy", "reason": reason, **more}, 503)

    async def metrics_text(self, request: Request) -> Response:
        key = key_of(request)
        if key is not None and key.key.models is not None and not key.key.admin:
            hint = "use a key without a list of models, or one with admin"
            raise ApiError(403, "the metrics are those of all models", code="model_not_allowed", hint=hint)
        text = await self.catalog.metrics_text(self.metrics, list(self.config.keys.metrics()))
        return Response(text, media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return json_response({"version": bagu.__version__})

    async def engine_stats(self, request: Request) -> Response:
        """The statistics for the engine panel of the chat page, with the median times to first token of the last
        requests (`?last=N`: of the last N). `?model=NAME` selects a model of a repository; the default is the first
        that the key may use."""
        self.catalog.check_ready()
        name = request.query_params.get("model") or next(iter(self.visible(request)), None)
        self.check_model(request, name)
        instance = await self.catalog.find(name, Caller(), request.receive)
        given = request.query_params.get("last", str(KEPT))
        if not (given.isascii() and given.isdigit() and len(given) < 10):
            raise ApiError(400, f"last is {given[:80]!r}", param="last", hint=f"a number of requests, up to {KEPT}")
        stats = await instance.engine.stats()
        if stats is None:
            raise ApiError(503, "the engine did not answer within 1 s", code="engine_busy")
        return json_response(engine_state(stats, instance.metrics, int(given)))

    async def openapi(self, request: Request) -> Response:
        return json_response(self._description(request))

    async def docs(self, request: Request) -> Response:
        return Response(reference.page(self._description(request)), headers=reference.HEADERS)

    @property
    def served(self) -> list[Operation]:
        """The operations with the access that they have on this server."""
        metrics: Access = "open" if self.config.open_metrics else "key"
        return [replace(o, access=metrics) if o.access == "metrics" else o for o in self.operations]

    async def on_unknown_model(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, UnknownModel)
        error.hint = f"this server has: {', '.join(self.visible(request))}"
        return error_response(error)

    def _description(self, request: Request) -> dict[str, Any]:
        """Everyone may read it; the names of the models are for those who have a key, if there are keys."""
        has_key = bool(self.config.keys)
        names = [] if has_key and key_of(request) is None else self.visible(request)
        return describe(names, self.catalog.ready, has_key=has_key, operations=self.served)

    def _model(self, name: str, visible: Sequence[str]) -> dict[str, Any]:
        about = {"id": name, "object": "model", "created": self.config.created, "owned_by": "bagu"}
        entry = self.catalog.entry(name)
        return {**about, **entry, **({"parent": None} if entry.get("parent") not in (None, *visible) else {})}


def make_app(api: Api) -> ApiMiddleware:
    """The ASGI application. Its lifespan starts and stops the engines."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        api.catalog.start()
        yield
        await api.catalog.stop()
        api.close_library()

    app = FastAPI(
        title="bagu", version=bagu.__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    # one route per path, whose 405 lists all its methods in Allow
    methods: dict[str, dict[str, tuple[Endpoint, Access]]] = {}
    for operation in api.served:
        methods.setdefault(operation.route, {})[operation.method] = getattr(api, operation.name), operation.access
    for route, endpoints in methods.items():
        app.router.routes.append(CountedRoute(route, _by_method(endpoints, api.config.keys), methods=list(endpoints)))
    for path, endpoint in (("/openapi.json", api.openapi), ("/docs", api.docs)):
        app.router.routes.append(CountedRoute(path, endpoint, methods=["GET"]))
    for path, asset in assets().items():
        app.router.routes.append(CountedRoute(path, _page(asset), methods=["GET"]))
    app.add_exception_handler(UnknownModel, api.on_unknown_model)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RecursionError, _on_recursion)
    app.add_exception_handler(Exception, _on_exception)
    return ApiMiddleware(
        app,
        api.metrics,
        keys=api.config.keys,
        allowed_origins=api.config.allowed_origins,
        observers=api.config.observers,
    )


def engine_state(stats: EngineStats, metrics: Metrics, last: int) -> dict[str, Any]:
    """The body of `/engine`; a number without data is null. `ttft_ms_p50` is measured in the server's process, and
    `engine_ttft_ms_p50` is the engine's part of it."""
    queries = stats.prefix_queries
    server_s, engine_s = metrics.first_token.quantile(0.5, last), metrics.engine_first_token.quantile(0.5, last)
    return {
        "tokens_per_s": stats.tokens_per_s,
        "running": stats.running,
        "waiting": stats.waiting,
        "batch_size": stats.batch_size,
        "tick_ms": 1e3 * stats.last_step_s,
        "preemptions": stats.preemptions,
        "ttft_ms_p50": None if server_s is None else 1e3 * server_s,
        "engine_ttft_ms_p50": None if engine_s is None else 1e3 * engine_s,
        "prefix_hit_percent": 100 * stats.prefix_hits / queries if queries else None,
        "draft_accept_percent": 100 * stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else None,
        "tokens_per_draft": 1 + stats.accepted_tokens / stats.drafts if stats.drafts else None,
        "generated_tokens": stats.generated_tokens,
        "steps": stats.steps,
        "blocks": {
            "total": stats.blocks_total,
            "used": stats.blocks_used,
            "cached": stats.blocks_cached,
            "map": stats.block_map,
        },
    }


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """An error of Starlette: unknown path, or wrong method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=error.headers))


async def _on_recursion(request: Request, error: Exception) -> Response:
    """A body whose schemas or messages are nested so deeply that Python cannot write them as JSON again."""
    return error_response(ApiError(400, "the body is nested too deeply"))


async def _on_exception(request: Request, error: Exception) -> Response:
    """A bug in the server: the client gets the exception's type, and uvicorn logs the traceback."""
    return error_response(ApiError(500, f"the server failed on this request: {type(error).__name__}"))


def _by_method(endpoints: Mapping[str, tuple[Endpoint, Access]], keys: Keys) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        handle, access = endpoints["GET" if request.method == "HEAD" else request.method]
        keys.check(key_of(request), access)
        return await handle(request)

    return endpoint


def _page(asset: Asset) -> Any:
    async def page(request: Request) -> Response:
        return Response(asset.body, headers={**HEADERS, "content-type": asset.media_type})

    return page


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
