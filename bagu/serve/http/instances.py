"""`Instance`: an engine with the name of its model. `Models`: finds the instance for the model name of a request.

`bagu serve MODEL` has one engine (`OneModel`). A model repository has one engine for each loaded version
(serve/repository), and everything else in this folder is the same for both.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from starlette.types import Receive

from bagu.serve.config import GenerationDefaults
from bagu.serve.http.bodies.openai import Job
from bagu.serve.http.engine import ServedEngine
from bagu.serve.http.errors import UnknownModel
from bagu.serve.http.observe.metrics import Metrics, metrics_text
from bagu.serve.wire.messages import Ready


class Caller(NamedTuple):
    """Who sends a request: the name of the API key, and the `user` of the body."""

    key: str | None = None
    user: str | None = None


class Instance:
    """An engine that answers requests. `name` is the model's name in responses."""

    def __init__(self, engine: ServedEngine, name: str, generation: GenerationDefaults) -> None:
        self.engine, self.name, self.generation = engine, name, generation
        self.uses = 0  # requests that are being prepared for this engine and not yet submitted to it

    @property
    def metrics(self) -> Metrics:
        return self.engine.pending.metrics

    def adapter(self, name: str | None) -> str | None:
        """The LoRA adapter that a request with this model name asks for; None for the base model."""
        return name if name in self.engine.adapters else None

    @contextmanager
    def in_use(self) -> Iterator[Ready]:
        """Keep the engine running while a request is prepared for it. Raises 503 if it is not ready."""
        ready = self.engine.require_ready()
        self.uses += 1
        try:
            yield ready
        finally:
            self.uses -= 1


class HasJob(Protocol):
    """A body that asks for generated text."""

    def to_job(self, ready: Ready) -> Job: ...


class Models(Protocol):
    """The models of a server."""

    @property
    def names(self) -> Sequence[str]: ...
    @property
    def ready(self) -> Ready | None:
        """The properties that all models have in common, for /openapi.json; None if they differ or are not known."""
        ...

    @property
    def sole(self) -> Instance | None:
        """The only engine, whose adapters requests may load; None in a repository."""
        ...

    def start(self) -> None: ...
    async def stop(self) -> None: ...
    def begin_shutdown(self) -> None:
        """No further engine is started; the running calls continue."""
        ...

    def fail_calls(self) -> None:
        """Fail the running calls: the time for them is over."""
        ...

    def check_ready(self) -> None:
        """Raise 503 if no request can be answered now, whichever model it names."""
        ...

    async def find(self, name: str | None, caller: Caller, receive: Receive) -> Instance:
        """The engine for a request with this model name. Raises 404 for an unknown name. It may wait while the model
        is replaced; `receive` tells when the client disconnects."""
        ...

    def other(self, failed: Instance, name: str | None, caller: Caller) -> Instance | None:
        """Another engine for a request whose engine died before it answered; None if there is none."""
        ...

    def copy(self, instance: Instance, body: HasJob) -> None:
        """Send a copy of a request to another engine, if the configuration says so; its answer is dropped."""
        ...

    def grants(self, name: str | None) -> Sequence[str]:
        """The names of which one in a key's list of models allows this model, whether or not there is such a model."""
        ...

    def entry(self, name: str) -> dict[str, Any]:
        """The model's entry in /v1/models, without id and date. Raises 404 for an unknown name."""
        ...

    def unhealthy_reason(self) -> str | None: ...
    def describe(self) -> list[dict[str, Any]]:
        """The replicas of the only engine, for /health; none if it is one process, and in a repository."""
        ...

    async def metrics_text(self, server: Metrics, more: Sequence[str] = ()) -> str: ...


class OneModel:
    """The only model of a server, which may have several names."""

    def __init__(self, engine: ServedEngine, names: Sequence[str], generation: GenerationDefaults) -> None:
        self._names = tuple(names)
        self._served = Instance(engine, self._names[0], generation)

    @property
    def names(self) -> Sequence[str]:
        """The names of the base model, then those of the adapters."""
        return (*self._names, *self._served.engine.adapters)

    @property
    def sole(self) -> Instance:
        return self._served

    @property
    def ready(self) -> Ready | None:
        return self._served.engine.ready

    def start(self) -> None:
        self._served.engine.start()

    async def stop(self) -> None:
        await self._served.engine.stop()

    def begin_shutdown(self) -> None:
        return None

    def fail_calls(self) -> None:
        self._served.engine.fail_calls()

    def check_ready(self) -> None:
        self._served.engine.require_ready()

    async def find(self, name: str | None, caller: Caller, receive: Receive) -> Instance:
        if name is not None:
            self._check(name)
        return self._served

    def other(self, failed: Instance, name: str | None, caller: Caller) -> Instance | None:
        return None

    def copy(self, instance: Instance, body: HasJob) -> None:
        return None

    def grants(self, name: str | None) -> Sequence[str]:
        """Any name of the base model allows it; an adapter is a model of its own."""
        return self._names if name is None or name in self._names else (name,)

    def entry(self, name: str) -> dict[str, Any]:
        self._check(name)
        parent = self._served.name if name in self._served.engine.adapters else None
        return {"parent": parent, **model_entry(self.ready, self._served.generation)}

    def unhealthy_reason(self) -> str | None:
        return self._served.engine.unhealthy_reason()

    def describe(self) -> list[dict[str, Any]]:
        return self._served.engine.describe()

    async def metrics_text(self, server: Metrics, more: Sequence[str] = ()) -> str:
        return metrics_text(server, [(self._served.metrics, await self._served.engine.stats())], more)

    def _check(self, name: str) -> None:
        if name not in self.names:
            raise UnknownModel(f"there is no model {name[:200]!r}")


def model_entry(ready: Ready | None, generation: GenerationDefaults) -> dict[str, Any]:
    """The maximum length and the default sampling of a model, if they are known and apply."""
    known: dict[str, Any] = {} if ready is None else {"max_model_len": ready.max_model_len}
    if ready is not None and ready.images is not None:
        known["images"] = True
    if ready is None or ready.generates:
        known["default_sampling"] = generation.effective
        known["suggested_prompts"] = list(generation.suggested_prompts)
    return known
