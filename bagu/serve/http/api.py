"""The HTTP server's routes: OpenAI's API, what operators ask (health, metrics), and the chat page.

A call to generate is `generate`: body -> job -> ticket -> reply. Nothing here waits for the engine but `await`.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

import bagu
from bagu.serve.config import GenerationDefaults
from bagu.serve.http import reference
from bagu.serve.http.calls import Call, Edge, EventStream, read_json, reply_error, reply_json, unless_gone
from bagu.serve.http.metrics import CONTENT_TYPE, KEPT, Metrics
from bagu.serve.http.openai import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, TokenizeBody, parse
from bagu.serve.http.openapi import OPERATIONS, describe
from bagu.serve.http.process import EngineProcess
from bagu.serve.http.responses import ChatReply, CompletionReply, Reply
from bagu.serve.http.tickets import ApiError
from bagu.serve.page import HEADERS, Asset, assets
from bagu.serve.stats import EngineStats

__all__ = ["Served", "make_app"]

LARGE_BODY = 64 * 2**10  # bytes from which tokenizing (1.8 MB/s) leaves the event loop


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served, and to whom."""

    names: tuple[str, ...]  # the model answers to each; the first is what replies say
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()  # of pages elsewhere that may read answers; "*" is every page
    created: int = 0  # seconds since 1970
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    request_timeout: float = 20.0  # seconds that a client has for the body of a request, beside those for its size


class Named(Route):
    """A route that says in the scope which it is, for the count of calls: FastAPI's router leaves that to its own."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return match, {**child, "route": self}


class Api:
    """The routes; each returns a response or raises ApiError."""

    def __init__(self, engine: EngineProcess, metrics: Metrics, served: Served) -> None:
        self.engine, self.metrics, self.served = engine, metrics, served

    async def chat_completions(self, request: Request) -> Response:
        return await self.generate(request, ChatBody, ChatReply)

    async def completions(self, request: Request) -> Response:
        return await self.generate(request, CompletionBody, CompletionReply)

    async def generate(
        self, request: Request, kind: type[ChatBody] | type[CompletionBody], reply_kind: type[Reply]
    ) -> Response:
        """Nothing is sent before the engine has accepted the call: a refusal there is still an HTTP status."""
        ready = self.engine.require()
        raw = await self.read(request)
        body = parse(kind, raw)
        self.check_model(body.model)
        if not ready.generates:
            raise ApiError(400, "this model embeds text and does not generate", hint="use /v1/embeddings")
        self.engine.tickets.check_room(body.num_choices)  # before anything is built for each of them
        job = await asyncio.to_thread(body.to_job, ready) if len(raw) > LARGE_BODY else body.to_job(ready)
        reply = reply_kind(job, ready, self.served.names[0])
        call = Call(self.engine, job.requests, request.receive)
        try:
            if job.stream:
                await call.ticket.accepted()
                return EventStream(reply, call)
            while events := await call.ticket.read():
                reply.take(events)
        except BaseException:
            call.close()
            raise
        call.close()
        return reply_json(reply.body())

    async def embeddings(self, request: Request) -> Response:
        ready = self.engine.require()
        raw = await self.read(request)
        body = parse(EmbeddingBody, raw)
        self.check_model(body.model)
        with self.engine.tickets.embedding_call():
            texts = await asyncio.to_thread(body.texts, ready) if len(raw) > LARGE_BODY else body.texts(ready)
            vectors = await unless_gone(self.engine.embed(texts), request.receive)
        encode = _base64 if body.encoding_format == "base64" else list
        data = [{"object": "embedding", "index": i, "embedding": encode(v)} for i, v in enumerate(vectors)]
        count = sum(map(len, texts))
        usage = {"prompt_tokens": count, "total_tokens": count}
        return reply_json({"object": "list", "data": data, "model": self.served.names[0], "usage": usage})

    async def models(self, request: Request) -> Response:
        return reply_json({"object": "list", "data": [self._model(name) for name in self.served.names]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        self.check_model(name)
        return reply_json(self._model(name))

    async def tokenize(self, request: Request) -> Response:
        ready = self.engine.require()
        raw = await self.read(request)
        body = parse(TokenizeBody, raw)
        self.check_model(body.model)
        ids = await asyncio.to_thread(body.ids, ready) if len(raw) > LARGE_BODY else body.ids(ready)
        return reply_json({"tokens": ids, "count": len(ids), "max_model_len": ready.max_model_len})

    async def detokenize(self, request: Request) -> Response:
        ready = self.engine.require()
        body = parse(DetokenizeBody, await self.read(request))
        self.check_model(body.model)
        return reply_json({"prompt": body.text(ready)})

    async def health(self, request: Request) -> Response:
        """200 when warm and ticking; 503 with the reason otherwise."""
        ill = self.engine.ill()
        if ill is None:
            return reply_json({"status": "ok"})
        return reply_json({"status": "unhealthy", "reason": ill}, 503)

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(await self.engine.stats()), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:
        return reply_json({"version": bagu.__version__})

    async def engine_stats(self, request: Request) -> Response:
        """What the page's panel shows: the engine's numbers, and the median times to first token of the last requests,
        `?last=N` of them."""
        self.engine.require()
        given = request.query_params.get("last", str(KEPT))
        if not (given.isascii() and given.isdigit() and len(given) < 10):
            raise ApiError(400, f"last is {given[:80]!r}", param="last", hint=f"a count of requests, up to {KEPT}")
        stats = await self.engine.stats()
        if stats is None:
            raise ApiError(503, "the engine did not answer within 1 s", code="engine_busy")
        return reply_json(panel(stats, self.metrics, int(given)))

    async def openapi(self, request: Request) -> Response:
        return reply_json(self._description())

    async def docs(self, request: Request) -> Response:
        return Response(reference.page(self._description()), headers=reference.HEADERS)

    def _description(self) -> dict[str, Any]:
        return describe(self.served.names, self.engine.ready, has_key=self.served.api_key is not None)

    async def read(self, request: Request) -> bytes:
        return await read_json(request, self.served.request_timeout)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.served.names:
            hint = f"served here: {', '.join(self.served.names)}"
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found", hint=hint)

    def _model(self, name: str) -> dict[str, Any]:
        ready = self.engine.ready
        known: dict[str, Any] = {} if ready is None else {"max_model_len": ready.max_model_len}
        if ready is None or ready.generates:
            known["default_sampling"] = self.served.generation.effective
        return {"id": name, "object": "model", "created": self.served.created, "owned_by": "bagu", **known}


def make_app(engine: EngineProcess, metrics: Metrics, served: Served) -> Edge:
    """The application; the engine's process lives as long as it does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.stop()

    app = FastAPI(
        title="bagu", version=bagu.__version__, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None
    )
    api = Api(engine, metrics, served)
    for operation in OPERATIONS:
        endpoint = getattr(api, operation.name)
        app.router.routes.append(Named(operation.route, endpoint, methods=[operation.method]))
    for path, endpoint in (("/openapi.json", api.openapi), ("/docs", api.docs)):
        app.router.routes.append(Named(path, endpoint, methods=["GET"]))
    for path, asset in assets().items():
        app.router.routes.append(Named(path, _page(asset), methods=["GET"]))
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_exception)
    return Edge(app, metrics, api_key=served.api_key, allowed_origins=served.allowed_origins)


def panel(stats: EngineStats, metrics: Metrics, last: int) -> dict[str, Any]:
    """The engine as the page's panel reads it; a number that there is not yet is null. `ttft_ms_p50` is what the server
    sees, and `engine_ttft_ms_p50` the engine's part of it."""
    queries = stats.prefix_queries
    server_s, engine_s = metrics.first_token.quantile(0.5, last), metrics.engine_first_token.quantile(0.5, last)
    return {
        "tokens_per_s": stats.tokens_per_s, "running": stats.running, "waiting": stats.waiting,
        "batch_size": stats.batch_size, "tick_ms": 1e3 * stats.last_step_s, "preemptions": stats.preemptions,
        "ttft_ms_p50": None if server_s is None else 1e3 * server_s,
        "engine_ttft_ms_p50": None if engine_s is None else 1e3 * engine_s,
        "prefix_hit_percent": 100 * stats.prefix_hits / queries if queries else None,
        "generated_tokens": stats.generated_tokens, "steps": stats.steps,
        "blocks": {
            "total": stats.blocks_total, "used": stats.blocks_used, "cached": stats.blocks_cached,
            "map": stats.block_map,
        },
    }  # fmt: skip


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return reply_error(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return reply_error(ApiError(error.status_code, message, headers=error.headers))


async def _on_exception(request: Request, error: Exception) -> Response:
    """A fault of the server: the client learns its kind, the log the rest (the server logs what it re-raises)."""
    return reply_error(ApiError(500, f"the server failed on this request: {type(error).__name__}"))


def _page(asset: Asset) -> Any:
    async def page(request: Request) -> Response:
        return Response(asset.body, headers={**HEADERS, "content-type": asset.media_type})

    return page


def _base64(vector: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
