"""One model of a repository: its versions, their traffic, and the operations that change them.

`promote` is the hot swap. A version is loaded and warmed up beside those that serve; then it gets the new requests, the
others finish theirs, and their processes end. If it does not start, nothing has changed. With limits (`return_when`)
the others stay loaded until the new version has passed its trial, and get the traffic back if it does not.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import Receive

from bagu.config import ConfigError
from bagu.errors import BaguError
from bagu.serve.http.calls import cancel_on_disconnect
from bagu.serve.http.errors import ApiError
from bagu.serve.http.instances import Caller, HasJob, Instance
from bagu.serve.http.process import SHUTTING_DOWN
from bagu.serve.repository.layout import Layout, Settings, check_weights, read_model
from bagu.serve.repository.traffic import Traffic
from bagu.serve.repository.version import Prepare, ShadowCalls, Version

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the models of a repository share."""

    folder: Path
    prepare: Prepare
    check_memory: Callable[[float, str], None]  # raises 409 if this share of the memory is not free
    default_share: float
    max_queue: int
    stall_s: float


class RepositoryModel:
    def __init__(self, layout: Layout, host: Host) -> None:
        self.name, self.layout, self.host = layout.name, layout, host
        self.versions = {number: Version(self.name, number) for number in layout.folders}
        self.traffic = Traffic(self.name, layout.initial)
        self.shadow = ShadowCalls()
        self.swaps = 0
        self._gate: asyncio.Event | None = None  # while a version is replaced; requests wait for it
        self._waiting = 0
        self._operation = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped = False

    @property
    def settings(self) -> Settings:
        return self.layout.settings

    @property
    def ready(self) -> list[int]:
        return [number for number, version in self.versions.items() if version.is_ready]

    @property
    def loaded(self) -> list[Version]:
        return [version for version in self.versions.values() if version.instance is not None]

    # Requests

    async def find(self, number: int | None, caller: Caller, receive: Receive) -> Instance:
        """The engine for a request; `number` is the version that it names, if any."""
        if self._gate is not None and number is None:
            await self._wait(self._gate, receive)
        return self.choose(number, caller)

    def choose(self, number: int | None, caller: Caller, *, without: Instance | None = None) -> Instance:
        """The version `number`, or one by weight; it is ready. Raises 404, or 503 with the reason if none is."""
        if number is not None:
            return self._ready_version(self.version(number))
        ready = [n for n in self.ready if without is None or self.versions[n].instance is not without]
        found = self.traffic.router.choose(ready, self._sticky(caller))
        if found is None:
            candidates = [self.versions[n] for n in self.traffic.weights if n in self.versions]
            if not candidates:
                message = f"no version of {self.name!r} is loaded"
                raise ApiError(503, message, param="model", code="model_unloaded", headers={"Retry-After": "1"})
            return self._ready_version(candidates[-1])
        instance = self.versions[found].instance
        assert instance is not None
        return instance

    def copy(self, instance: Instance, body: HasJob) -> None:
        """Send a copy of a request to the shadow version."""
        shadow = self.settings.shadow
        if shadow is None or (version := self.versions.get(shadow.version)) is None or not version.is_ready:
            return
        if version.instance is not None and version.instance is not instance:
            self.shadow.send(version.instance, body, shadow.share)

    def version(self, number: int) -> Version:
        if number not in self.versions:
            hint = f"it has: {', '.join(map(str, self.versions))}"
            message = f"{self.name!r} has no version {number}"
            raise ApiError(404, message, param="model", code="model_not_found", hint=hint)
        return self.versions[number]

    def _ready_version(self, version: Version) -> Instance:
        if version.instance is None or version.state == "draining":
            message = f"{version.name} is {version.state}" + (f": {version.reason}" if version.reason else "")
            raise ApiError(503, message, param="model", code="model_unloaded", headers={"Retry-After": "1"})
        version.instance.engine.require_ready()
        return version.instance

    def _sticky(self, caller: Caller) -> str | None:
        if self.settings.sticky == "none":
            return None
        return caller.user or (caller.key if self.settings.sticky == "key" else None)

    async def _wait(self, gate: asyncio.Event, receive: Receive) -> None:
        if self._waiting >= self.settings.replace_queue:
            message = f"{self.name!r} is being replaced, and {self._waiting} requests wait for it"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self._waiting += 1
        try:
            await cancel_on_disconnect(gate.wait(), receive)
        finally:
            self._waiting -= 1

    # Operations

    async def start(self) -> None:
        """Load the versions of the configuration, one after the other."""
        async with self._operation:
            for number in self.layout.loaded_at_start:
                try:
                    await self._load(number)
                except BaguError as error:
                    _log(f"{self.name}@{number} is not loaded: {error}")

    async def load(self, number: int) -> None:
        """Load a version without traffic, or do nothing if it is loaded."""
        async with self._operation:
            await self._read_folder()
            await self._load(number)

    async def unload(self, number: int) -> None:
        """Take the traffic from a version, let its requests finish, and stop it."""
        async with self._operation:
            version = self.version(number)
            others = {n: weight for n, weight in self.traffic.weights.items() if n != number}
            self._drain(n for n in self.traffic.set(others, self.versions, None) if n != number)
            await version.drain(self.settings.drain_s)

    async def promote(self, number: int) -> None:
        """Give a version all the traffic; it is loaded if it is not. The others are unloaded."""
        async with self._operation:
            await self._read_folder()
            version = self.version(number)
            if not version.is_ready and self.settings.swap == "replace" and self.loaded:
                await self._replace(number)
            else:
                await self._load(number)
                self.traffic.set({number: 1.0}, self.versions, self.settings.return_when)
                self._drain(n for n in self.versions if n not in self.traffic.kept)
            self.swaps += 1
            _log(f"{self.name}: version {number} serves")

    async def set_weights(self, weights: Mapping[int, float]) -> None:
        """Set the shares of the traffic. The versions with a weight are loaded if they are not."""
        try:
            check_weights(weights)
        except ConfigError as error:
            raise ApiError(400, str(error), param="weights", hint=error.hint) from error
        async with self._operation:
            await self._read_folder()
            for number in weights:
                self.version(number)
            for number, weight in weights.items():
                if weight > 0:
                    await self._load(number)
            self._drain(self.traffic.set(weights, self.versions, self.settings.return_when))

    async def run(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation to its end, also if the client that asked for it disconnects. Raises 503 at a shutdown."""
        if self._stopped:
            operation.close()
            raise ApiError(503, SHUTTING_DOWN)
        task = self._spawn(operation)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ApiError(503, SHUTTING_DOWN) from None
            raise

    def begin_shutdown(self) -> None:
        """Cancel the operations; versions that are loading are stopped."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()

    async def stop(self) -> None:
        self.begin_shutdown()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.shadow.stop()
        await asyncio.gather(*(version.stop() for version in self.versions.values()))

    async def _read_folder(self) -> None:
        """Read the settings and the list of versions again: the user may have added one."""
        try:
            self.layout = await asyncio.to_thread(read_model, self.host.folder / self.name)
        except BaguError as error:
            raise ApiError(400, str(error), hint=error.hint) from error
        for number in self.layout.folders:
            self.versions.setdefault(number, Version(self.name, number))

    async def _load(self, number: int) -> None:
        version = self.version(number)
        if version.is_ready:
            return
        if version.instance is not None:
            message = f"{version.name} is {version.state}"
            raise ApiError(409, message, code="version_busy", hint="wait until it is ready or unloaded")
        if number not in self.layout.folders:
            raise ApiError(404, f"the folder of {version.name} is gone", code="model_not_found")
        share = self.settings.memory_share or self.host.default_share
        self.host.check_memory(share, version.name)
        niceness = self.settings.load_niceness if self.ready else 0
        engine = await asyncio.to_thread(self.host.prepare, self.layout.folders[number], self.settings, share)
        reason = await version.load(
            engine, share, max_queue=self.host.max_queue, stall_s=self.host.stall_s, niceness=niceness
        )
        if reason is not None:
            raise ApiError(409, f"{version.name} did not start: {reason}", code="load_failed")

    async def _replace(self, number: int) -> None:
        """Unload the versions that serve, then load the new one; requests wait meanwhile. If it does not start, the old
        ones are loaded again."""
        before, gate = self.traffic.weights, asyncio.Event()
        self._gate = gate
        try:
            await asyncio.gather(*(version.drain(self.settings.drain_s) for version in self.loaded))
            try:
                await self._load(number)
            except BaguError:
                for old in before:
                    await self._load(old)
                raise
            self.traffic.set({number: 1.0}, self.versions, None)  # the others are unloaded already
        finally:
            self._gate = None
            gate.set()

    def check_trial(self) -> None:
        """Give the traffic back if a version on trial has exceeded a limit; unload the versions that lost it."""
        returns = self.traffic.returns
        self._drain(self.traffic.check(self.versions))
        if self.traffic.returns > returns:
            serving = ", ".join(map(str, self.traffic.weights))
            _log(f"{self.name}: the traffic returns to version {serving}; {self.traffic.last_return}")

    def _drain(self, numbers: Iterable[int]) -> None:
        shadow = None if self.settings.shadow is None else self.settings.shadow.version
        for number in numbers:
            if number != shadow and self.versions[number].state in ("ready", "restarting"):
                self._spawn(self.versions[number].drain(self.settings.drain_s))

    def _spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Description

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "versions": [
                {
                    "version": version.number,
                    "state": version.state,
                    "weight": self.traffic.share(version.number),
                    "in_trial": self.traffic.in_trial(version.number),
                    "reason": version.reason or None,
                    "requests": _requests(version),
                    "errors": version.metrics.errors,
                }
                for version in self.versions.values()
            ],
            "swaps": self.swaps,
            "returns": self.traffic.returns,
            "last_return": self.traffic.last_return,
        }


def _requests(version: Version) -> int:
    return sum(version.metrics.finished.values())


def _log(text: str) -> None:
    print(f"bagu serve: {text}", file=sys.stderr, flush=True)
