"""What all groups of routes share: the models, reading a body, and running a generation."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from fastapi import Request
from starlette.responses import Response

from bagu.serve.http.bodies.openai import Body, Job
from bagu.serve.http.calls import KEY, ClientCall, EventStream, json_response, read_json
from bagu.serve.http.errors import ApiError
from bagu.serve.http.instances import Caller, Instance, Models
from bagu.serve.http.keys import Keys, KeyUse
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.observe.record import RECORD, Observer
from bagu.serve.http.responses import GenerationResponse
from bagu.serve.wire.messages import Ready

ENGINE_GONE = ("engine_died", "engine_restarting")  # codes of errors after which another engine may answer
LARGE_BODY = 64 * 2**10  # bytes; larger bodies are tokenized (1.8 MB/s) in a thread, not in the event loop


@dataclass(frozen=True, kw_only=True)
class ApiConfig:
    """The keys and limits of the API."""

    keys: Keys = field(default_factory=Keys)
    allowed_origins: tuple[str, ...] = ()  # CORS: origins whose pages may read responses; "*" is every page
    open_metrics: bool = False  # /metrics and /engine need no key
    created: int = 0  # Unix time, reported by /v1/models
    observers: tuple[Observer, ...] = ()  # called with the record of every request that has ended
    files: Path | None = None  # folder of the uploaded files; None: a temporary one
    indexes: Mapping[str, Path] = field(default_factory=dict)  # by name; every key may search them
    image_hosts: frozenset[str] = frozenset()  # whose images are fetched
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

    def __init__(self, models: Models, metrics: Metrics, config: ApiConfig) -> None:
        self.catalog, self.metrics, self.config = models, metrics, config

    async def read(self, request: Request) -> bytes:
        return await read_json(request, self.config.request_timeout)

    async def find(self, request: Request, name: str | None, caller: Caller | None = None) -> Instance:
        """The engine for a request. Raises 403, 404, 429 or 503 if the request may not run now."""
        key = key_of(request)
        if key is not None:
            key.admit(time.time())
        self.check_model(request, name)
        instance = await self.catalog.find(name, caller or Caller(), request.receive)
        self._note(request, instance)
        return instance

    def check_model(self, request: Request, name: str | None) -> None:
        """Raise 403 if the key may not use the model of this name; None is the server's only model."""
        if (key := key_of(request)) is not None:
            key.check_model(*self.catalog.grants(name))

    def visible(self, request: Request) -> list[str]:
        """The names of the models that the key of a request may use."""
        key = key_of(request)
        return [n for n in self.catalog.names if key is None or key.may_use(*self.catalog.grants(n))]

    def _note(self, request: Request, instance: Instance) -> None:
        """Write into the record of a request which engine answers it."""
        record = request.scope[RECORD]
        record.model, record.version_label = instance.name, instance.metrics.version_label

    def charge(self, request: Request, tokens: int) -> None:
        """Count the tokens of a request without generation for its key."""
        if (key := key_of(request)) is not None:
            key.charge(tokens, time.time())

    async def run_generation(
        self,
        request: Request,
        body: GenerationBody,
        respond: Callable[[Job, Ready, str], GenerationResponse],
        *,
        large: bool,
        user: str | None = None,
    ) -> Response:
        """Run a generation. If the engine dies before the response begins, another engine of the model runs it, if
        there is one: once, since the request may be the reason. `large`: tokenize in a thread."""
        key = key_of(request)
        caller = Caller(None if key is None else key.key.name, user)
        instance = await self.find(request, body.model, caller)
        try:
            return await self._generate(request, instance, body, respond, large)
        except ApiError as error:
            other = self.catalog.other(instance, body.model, caller) if error.code in ENGINE_GONE else None
            if other is None:
                raise
        self._note(request, other)
        return await self._generate(request, other, body, respond, large)

    async def _generate(
        self,
        request: Request,
        instance: Instance,
        body: GenerationBody,
        respond: Callable[[Job, Ready, str], GenerationResponse],
        large: bool,
    ) -> Response:
        """body -> job -> pending call -> response. A stream starts only after the engine has accepted the requests, so
        that a refusal has an HTTP status."""
        with instance.in_use() as ready:
            if not ready.generates:
                hint = "use /v1/score" if ready.scores else "use /v1/embeddings"
                raise ApiError(400, f"this model {ready.other_use} and does not generate", hint=hint)
            instance.engine.pending.check_capacity(body.num_choices)  # before memory is allocated for each choice
            job = await asyncio.to_thread(body.to_job, ready) if large else body.to_job(ready)
            adapter = instance.adapter(body.model)
            if adapter is not None:
                job = job._replace(requests=tuple(replace(r, adapter=adapter) for r in job.requests))
            response = respond(job, ready, adapter or instance.name)
            call = ClientCall(instance.engine, job.requests, request.receive, key_of(request))
            record = request.scope[RECORD]
            record.model, record.call = adapter or instance.name, call.pending
        self.catalog.copy(instance, body)
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


def key_of(request: Request) -> KeyUse | None:
    """The API key of a request; None if the server has no keys."""
    found: KeyUse | None = request.scope.get(KEY)
    return found


def user_of(body: Body) -> str | None:
    """The body's `user`, which identifies a user of the client in the OpenAI API."""
    user = (body.model_extra or {}).get("user")
    return user if isinstance(user, str) else None
