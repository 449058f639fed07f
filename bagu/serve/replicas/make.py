"""One engine process, or several that answer as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from bagu.serve.config import EngineConfig
from bagu.serve.http.engine import ServedEngine
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.pending import PendingCalls
from bagu.serve.http.process import EngineProcess
from bagu.serve.replicas.options import ReplicaSpec
from bagu.serve.replicas.replica_set import ReplicaSet
from bagu.serve.wire.messages import Load


class Replicas(NamedTuple):
    """The engines of a model, in the order in which they start; `least` of them run always."""

    specs: tuple[ReplicaSpec, ...]
    least: int
    router: str = "finish"


def make_engine(
    load: Load,
    config: EngineConfig,
    metrics: Metrics,
    *,
    max_queue: int,
    stall_s: float,
    replicas: Replicas | None = None,
    load_draft: Load | None = None,
    niceness: int = 0,
    on_failure: Callable[[], None] = lambda: None,
) -> ServedEngine:
    """The engine of a model: `max_queue` choices may wait beside those that run."""
    if replicas is None:
        pending = PendingCalls(config.max_num_seqs + max_queue, metrics)
        return EngineProcess(
            load, config, pending, stall_s=stall_s, on_failure=on_failure, load_draft=load_draft, niceness=niceness
        )
    pending = PendingCalls(sum(spec.config.max_num_seqs for spec in replicas.specs) + max_queue, metrics)
    return ReplicaSet(
        replicas.specs,
        pending,
        router=replicas.router,
        least=replicas.least,
        stall_s=stall_s,
        on_failure=on_failure,
        niceness=niceness,
    )
