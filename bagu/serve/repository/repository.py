"""The models of a repository as the HTTP server sees them (`Models`)."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.types import Receive

from bagu.serve.http.errors import ApiError, UnknownModel
from bagu.serve.http.instances import Caller, HasJob, Instance, model_entry
from bagu.serve.http.observe.metrics import Metrics, labels, metrics_text, sample
from bagu.serve.repository.layout import Layout, is_version, read_repository
from bagu.serve.repository.model import Host, RepositoryModel
from bagu.serve.repository.version import Prepare
from bagu.serve.wire.messages import Ready

WATCH_S = 0.2  # between two checks of the limits
MEMORY = 0.9  # of the device's memory for all versions; the rest is for the server and the system


class Repository:
    """`on_failure` is called if no version could be loaded at the start. `memory_bytes` is that of the device."""

    def __init__(
        self,
        folder: Path,
        prepare: Prepare,
        *,
        max_queue: int,
        stall_s: float,
        memory_bytes: int | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        layouts = read_repository(folder)
        wanted = sum(len(layout.loaded_at_start) for layout in layouts.values())
        self._host = Host(
            folder=folder,
            prepare=prepare,
            check_memory=self._check_memory,
            max_queue=max_queue,
            stall_s=stall_s,
            default_share=MEMORY / (wanted + 1),  # one more version during a swap
        )
        self._memory_bytes, self._on_failure = memory_bytes, on_failure
        self.models = {name: RepositoryModel(layout, self._host) for name, layout in layouts.items()}
        self._started = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def names(self) -> Sequence[str]:
        """NAME for every model, and NAME@VERSION for every loaded version."""
        versions = [version.name for model in self.models.values() for version in model.loaded]
        return (*self.models, *versions)

    @property
    def ready(self) -> Ready | None:
        return None

    @property
    def sole(self) -> Instance | None:
        return None

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._start()), asyncio.create_task(self._watch())]

    def begin_shutdown(self) -> None:
        for model in self.models.values():
            model.begin_shutdown()

    def fail_calls(self) -> None:
        for model in self.models.values():
            for version in model.loaded:
                if version.instance is not None:
                    version.instance.engine.fail_calls()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(model.stop() for model in self.models.values()))

    def check_ready(self) -> None:
        return None  # the body names the model

    async def find(self, name: str | None, caller: Caller, receive: Receive) -> Instance:
        model, number = self.model_of(name)
        return await model.find(number, caller, receive)

    def other(self, failed: Instance, name: str | None, caller: Caller) -> Instance | None:
        model, number = self.model_of(name)
        if number is not None:
            return None
        try:
            return model.choose(None, caller, without=failed)
        except ApiError:
            return None

    def copy(self, instance: Instance, body: HasJob) -> None:
        self.models[instance.name.partition("@")[0]].copy(instance, body)

    def grants(self, name: str | None) -> Sequence[str]:
        """The name of the model allows all its versions, NAME@VERSION one of them."""
        version = (self.model_of(None)[0].name if name is None else name).replace(":", "@")
        return version, version.partition("@")[0]

    def entry(self, name: str) -> dict[str, Any]:
        model, number = self.model_of(name)
        versions = [model.version(number)] if number is not None else [model.versions[n] for n in model.ready]
        instance = next((v.instance for v in versions if v.instance is not None), None)
        return {} if instance is None else model_entry(instance.engine.ready, instance.generation)

    def model_of(self, name: str | None) -> tuple[RepositoryModel, int | None]:
        """The model of NAME, NAME@VERSION or NAME:VERSION, and the version. None is the only model."""
        if name is None:
            if len(self.models) == 1:
                return next(iter(self.models.values())), None
            raise UnknownModel("the body has no model", 400)
        base, _, version = name.replace(":", "@").partition("@")
        if base not in self.models or (version and not is_version(version)):
            raise UnknownModel(f"there is no model {name[:200]!r}")
        return self.models[base], int(version) if version else None

    def add(self, layout: Layout) -> RepositoryModel:
        """Add a model whose folder was made after the server started."""
        return self.models.setdefault(layout.name, RepositoryModel(layout, self._host))

    @property
    def folder(self) -> Path:
        return self._host.folder

    def unhealthy_reason(self) -> str | None:
        """Unhealthy until all versions of the start are loaded or have failed, and while no model can answer. /health
        needs no key, so the reason has no names of models."""
        if not self._started:
            return "the models are loading"
        reasons = []
        for model in self.models.values():
            for number in model.ready:
                instance = model.versions[number].instance
                reason = None if instance is None else instance.engine.unhealthy_reason()
                if reason is None:
                    return None
                reasons.append(reason)
        return "; ".join(dict.fromkeys(reasons)) or "no model is loaded"

    def describe(self) -> list[dict[str, Any]]:
        return []

    async def metrics_text(self, server: Metrics, more: Sequence[str] = ()) -> str:
        versions = [version for model in self.models.values() for version in model.versions.values()]
        instance = [version.instance for version in versions]
        found = await asyncio.gather(*(_stats(s) for s in instance))
        engines = [(version.metrics, stats) for version, stats in zip(versions, found, strict=True)]
        return metrics_text(server, engines, [*self._metrics(), *more])

    def _metrics(self) -> Iterator[str]:
        models = self.models.values()
        versions = [(m, entry) for m in models for entry in m.describe()["versions"]]
        yield from sample(
            "bagu:repository_version_state",
            "gauge",
            "1 for the state of each version.",
            [(labels(model_name=m.name, version=str(v["version"]), state=v["state"]), 1) for m, v in versions],
        )
        yield from sample(
            "bagu:repository_weight",
            "gauge",
            "Share of the model's traffic, 0 to 1.",
            [(labels(model_name=m.name, version=str(v["version"])), v["weight"]) for m, v in versions],
        )
        yield from sample(
            "bagu:repository_swaps_total",
            "counter",
            "Versions promoted.",
            [(labels(model_name=m.name), m.swaps) for m in models],
        )
        yield from sample(
            "bagu:repository_returns_total",
            "counter",
            "Automatic returns to the version before.",
            [(labels(model_name=m.name), m.traffic.returns) for m in models],
        )
        yield from sample(
            "bagu:shadow_requests_total",
            "counter",
            "Copies of requests to the shadow version, by result.",
            [
                (labels(model_name=m.name, result=result), m.shadow.counts[result])
                for m in models
                if m.settings.shadow is not None
                for result in ("ok", "error", "dropped")
            ],
        )

    async def _start(self) -> None:
        for model in self.models.values():
            await model.run(model.start())
        self._started = True
        if not any(model.loaded for model in self.models.values()):
            self._on_failure()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            for model in self.models.values():
                model.check_trial()

    def _check_memory(self, share: float, name: str) -> None:
        used = sum(version.share for model in self.models.values() for version in model.loaded)
        if (missing := used + share - 1.0) <= 1e-9:
            return
        hint = 'unload another version, lower memory_share, or set swap = "replace"'
        needs, free = self._amount(share), self._amount(1.0 - used)
        found = f"{name} needs {needs}, and {free} is free: {self._amount(missing)} is missing"
        raise ApiError(409, found, code="insufficient_memory", hint=hint)

    def _amount(self, share: float) -> str:
        percent = f"{math.ceil(1e3 * share - 1e-6) / 10:g} % of the memory"
        return percent if self._memory_bytes is None else f"{percent} ({share * self._memory_bytes / 1e9:.2f} GB)"


async def _stats(instance: Instance | None) -> Any:
    return None if instance is None else await instance.engine.stats()
