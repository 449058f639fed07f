"""`bagu serve --replicas`: the engines of one model on this machine, or on a Ray cluster."""

import os
from dataclasses import replace

from bagu.machine.cores import available_cores
from bagu.recipes.loader import Loader
from bagu.serve.config import EngineConfig
from bagu.serve.replicas.make import Replicas
from bagu.serve.replicas.options import ReplicaOptions, Replication


def find_replication(options: ReplicaOptions) -> Replication | None:
    """The replicas that the options ask for on this machine or on a cluster."""
    if options.replicas is None:
        return None
    if options.ray is not None:
        from bagu.serve.replicas.on_ray import RayEngines

        cluster = RayEngines(options.ray)
        placed = options.replication(cores=cluster.cores, gpus=cluster.gpus)
        return None if placed is None else replace(placed, launch=cluster.launch)
    from bagu.machine.device import this_machine  # here: it imports torch

    return options.replication(cores=available_cores(), gpus=len(this_machine().gpus))


def replicas_of(
    replication: Replication | None, loader: Loader, engine: EngineConfig, draft: Loader | None = None
) -> Replicas | None:
    if replication is None:
        return None
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(available_cores())
    specs = replication.specs(
        engine,
        cores,
        lambda device: replace(loader, device=device),
        lambda device: None if draft is None else replace(draft, device=device),
    )
    return Replicas(specs, replication.least, replication.router)
