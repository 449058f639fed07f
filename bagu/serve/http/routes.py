"""What all groups of routes share: the engine, reading a body, and running a generation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from fastapi import Request
from starlette.responses import Response

from bagu.serve.config import GenerationDefaults
from bagu.serve.http.calls import ClientCall, EventStream, json_response, read_json
from bagu.serve.http.errors import ApiError
from bagu.serve.http.metrics import Metrics
from bagu.serve.http.openai import Job
from bagu.serve.http.pipe import Ready
from bagu.serve.http.process import EngineProcess
from bagu.serve.http.responses import GenerationResponse

__all__ = ["LARGE_BODY", "ApiConfig", "Routes"]

LARGE_BODY = 64 * 2**10  # bytes; larger bodies are tokenized (1.8 MB/s) in a thread, not in the event loop


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """The model's names and the limits of the API."""

    names: tuple[str, ...]  # names of the model that requests may use; responses contain the first
    api_key: str | None = None
    allowed_origins: tuple[str, ...] = ()  # CORS: origins whose pages may read responses; "*" is every page
    created: int = 0  # Unix time, reported by /v1/models
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    request_timeout: float = 20.0  # seconds for the body of a request, plus one per calls.MIN_RATE bytes


class GenerationBody(Protocol):
    """A body that asks for generated text."""

    @property
    def model(self) -> str | None: ...
    @property
    def num_choices(self) -> int: ...
    @property
    def grammar_field(self) -> str: ...
    def to_job(self, ready: Ready) -> Job: ...


class Routes:
    """The base of the endpoints; each returns a response or raises ApiError."""

    def __init__(self, engine: EngineProcess, metrics: Metrics, config: ApiConfig) -> None:
        self.engine, self.metrics, self.config = engine, metrics, config

    async def read(self, request: Request) -> bytes:
        return await read_json(request, self.config.request_timeout)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use: the base model's, then those of the adapters."""
        return (*self.config.names, *self.engine.adapters)

    def check_model(self, name: str | None) -> str | None:
        """The adapter that a request asks for, None for the base model. Raises 404 for an unknown name."""
        if name is None or name in self.config.names:
            return None
        if name not in self.engine.adapters:
            hint = f"this server has: {', '.join(self.model_names)}"
            raise ApiError(404, f"there is no model {name!r}", param="model", code="model_not_found", hint=hint)
        return name

    async def run_generation(
        self,
        request: Request,
        body: GenerationBody,
        respond: Callable[[Job, Ready, str], GenerationResponse],
        *,
        large: bool,
    ) -> Response:
        """Run a generation: body -> job -> pending call -> response. A stream starts only after the engine has accepted
        the requests, so that a refusal has an HTTP status. `large`: tokenize in a thread."""
        ready = self.engine.require_ready()
        adapter = self.check_model(body.model)
        if not ready.generates:
            hint = "use /v1/score" if ready.scores else "use /v1/embeddings"
            raise ApiError(400, f"this model {ready.other_use} and does not generate", hint=hint)
        self.engine.pending.check_capacity(body.num_choices)  # before memory is allocated for each choice
        job = await asyncio.to_thread(body.to_job, ready) if large else body.to_job(ready)
        if adapter is not None:
            job = job._replace(requests=tuple(replace(r, adapter=adapter) for r in job.requests))
        response = respond(job, ready, adapter or self.config.names[0])
        call = ClientCall(self.engine, job.requests, request.receive)
        try:
            if job.stream:
                await call.pending.wait_until_accepted()
                return EventStream(response, call)
            while events := await call.pending.read():
                response.add(events)
        except BaseException as error:
            call.close()
            if isinstance(error, ApiError) and error.param == "grammar":  # its name in the engine
                error.param = body.grammar_field
            raise
        call.close()
        return json_response(response.body())
