"""The options of `bagu serve` for several engines of one model, and what each engine is started with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, NamedTuple

from bagu.config.options import Option
from bagu.errors import ArgumentError, UnknownName
from bagu.parallel.unlike.workers import Cores, Worker, divide_cores, parse_workers
from bagu.serve.config import EngineConfig
from bagu.serve.replicas.router import POLICIES

if TYPE_CHECKING:  # the command line reads the options, and nothing of the server
    from bagu.serve.http.launch import Launch
    from bagu.serve.wire.messages import Load

AUTO_CORES = 4  # `auto` without a GPU: an engine for this many cores


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    replicas: Annotated[
        str | None, Option("Engines of this model: auto, 3, or e.g. cpu:2,cpu:1 (docs/replicas.md).", metavar="LIST")
    ] = None
    router: Annotated[str, Option("Which replica gets a request: finish, p2c, queue or rr.")] = "finish"
    min_replicas: Annotated[int | None, Option("Stop replicas without work, down to this many.")] = None
    max_replicas: Annotated[int | None, Option("Start replicas while requests wait, up to this many.")] = None
    ray: Annotated[
        str | None, Option("Place the replicas on a Ray cluster: auto, local, or its address.", metavar="ADDRESS")
    ] = None

    def __post_init__(self) -> None:
        UnknownName.check("router", self.router, POLICIES)
        given = [n for n in ("min_replicas", "max_replicas", "ray") if getattr(self, n) is not None]
        if self.replicas is None and (given or self.router != "finish"):
            name = (given or ["router"])[0].replace("_", "-")
            raise ArgumentError(f"--{name} without --replicas", hint="give --replicas auto, a number, or a list")
        if any(n is not None and n < 1 for n in (self.min_replicas, self.max_replicas)):
            raise ArgumentError(f"{self.min_replicas} to {self.max_replicas} replicas", hint="give 1 or more")

    def replication(self, *, cores: int, gpus: int) -> Replication | None:
        """The replicas for a machine or a cluster; None if they are not asked for. A list names those of the start: the
        last one is repeated up to --max-replicas. `auto` is one for each GPU, or one for every AUTO_CORES cores."""
        if self.replicas is None:
            return None
        if self.replicas == "auto":
            number = self.max_replicas or gpus or max(1, cores // AUTO_CORES)
            each = None if gpus or self.ray is None else AUTO_CORES
            workers: tuple[Worker, ...] = (Worker(kind="cuda" if gpus else "cpu", cores=each),) * number
        else:
            workers = parse_workers(self.replicas)
        most = self.max_replicas or len(workers)
        workers = (*workers, *workers[-1:] * (most - len(workers)))[:most]
        least = self.min_replicas or (1 if self.replicas == "auto" and self.max_replicas else len(workers))
        if least > most:
            raise ArgumentError(f"{least} to {most} replicas", hint="--min-replicas is at most --max-replicas")
        wanted = sum(worker.kind == "cuda" for worker in workers)
        if wanted > gpus:
            raise ArgumentError(f"{wanted} replicas with a GPU, and there are {gpus}", hint="give one for each GPU")
        return Replication(workers=workers, least=least, router=self.router)


class ReplicaSpec(NamedTuple):
    """How the engine process of a replica is started. `name` is its device and cores."""

    name: str
    load: Load
    config: EngineConfig
    load_draft: Load | None = None
    launch: Launch | None = None  # None: a process of this machine


@dataclass(frozen=True, kw_only=True)
class Replication:
    """Replicas in the order in which they are started; the last ones are stopped first. `launch` gives the way in which
    the engines of a worker are started on a cluster."""

    workers: tuple[Worker, ...]
    least: int
    router: str = "finish"
    launch: Callable[[Worker], Launch] | None = None

    def specs(
        self,
        config: EngineConfig,
        cores: Sequence[int],
        load: Callable[[str], Load],
        load_draft: Callable[[str], Load | None] = lambda device: None,
    ) -> tuple[ReplicaSpec, ...]:
        """The engines: `load` gives the function that loads the model onto a device."""
        if config.tp > 1:
            raise ArgumentError(f"replicas with tp = {config.tp}", hint="choose one: each replica is on one device")
        found, gpus, launch = list[ReplicaSpec](), 0, self.launch
        if launch is None:
            each = divide_cores(self.workers, cores).of
        else:
            each = tuple(Cores(threads=worker.cores or 1) for worker in self.workers)
        for worker, own in zip(self.workers, each, strict=True):
            device = worker.kind
            if worker.kind == "cuda":
                device = f"cuda:{gpus}"
                gpus += launch is None  # a cluster shows an engine its own GPU only
            mine = replace(config, device=device, threads=own.threads, cores=own.pinned, is_replica=True)
            name = device if worker.kind == "cuda" else f"cpu:{own.threads}"
            start = None if launch is None else launch(worker)
            found.append(ReplicaSpec(name, load(device), mine, load_draft(device), start))
        return tuple(found)
