"""The layouts to consider: every way to divide the GPUs, with the options of each, pruned by what cannot run."""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from bagu.errors import ArgumentError
from bagu.nn.config import ModelConfig
from bagu.parallel.mesh import MeshConfig
from bagu.parallel.model_parallel import check_model_parallel
from bagu.parallel.planner.cluster import Cluster
from bagu.parallel.planner.layouts import SCHEDULES, Layouts, Workload

MICRO_BATCHES = (1, 2, 4, 8, 16)
STAGES = ((1, 0), (2, 0), (4, 0), (1, 1))  # (stages per rank, schedule)
SHORTEST_PART = 2048  # tokens of a sequence on a context-parallel rank: shorter parts only add latency


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def candidates(workload: Workload, cluster: Cluster, gpus: int) -> Layouts:
    """All layouts over exactly `gpus` GPUs. May be empty: no number of data-parallel ranks divides the batch."""
    grids = np.array(list(_grids(workload, cluster, gpus)), dtype=np.int64).reshape(-1, 5)
    options = np.array(
        [
            (zero, hybrid, micro, virtual, schedule, recompute)
            for zero, hybrid in ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1))
            for micro in MICRO_BATCHES
            for virtual, schedule in STAGES
            for recompute in range(3)
        ],
        dtype=np.int64,
    )
    grid = np.repeat(grids, len(options), axis=0).T
    option = np.tile(options, (len(grids), 1)).T
    dp, tp, cp, pp, ep = grid
    zero, hybrid, micro, virtual, schedule, recompute = option
    inside = np.maximum(cluster.gpus_per_node // (tp * cp), 1)
    shard = np.where(zero == 0, 1, np.where(hybrid == 1, inside, dp))
    all_layouts = Layouts(
        dp=dp, shard=shard, tp=tp, cp=cp, pp=pp, ep=ep, zero=zero, sequence_parallel=(tp > 1).astype(np.int64),
        micro_batch=micro, virtual=virtual, schedule=schedule, recompute=recompute,
    )  # fmt: skip
    possible = all_layouts.where(_can_run(workload, all_layouts, hybrid))
    return possible.where(_trainer_takes(workload, possible))


def _grids(workload: Workload, cluster: Cluster, gpus: int) -> Iterator[tuple[int, int, int, int, int]]:
    """(dp, tp, cp, pp, ep): sizes that multiply to the GPUs; ep divides dp."""
    model = workload.model
    for tp in _tensor_sizes(model, cluster, gpus):
        for pp in divisors(gpus // tp):
            if pp > model.num_layers:
                break
            for cp in divisors(gpus // tp // pp):
                if cp > 1 and (workload.seq % (2 * cp) or workload.seq // cp < SHORTEST_PART):
                    continue
                dp = gpus // tp // pp // cp
                if workload.batch % dp:
                    continue
                for ep in _expert_sizes(model, dp):
                    yield dp, tp, cp, pp, ep


def _tensor_sizes(model: ModelConfig, cluster: Cluster, gpus: int) -> list[int]:
    """Inside one NVLink domain; heads, KV heads and FFN must divide."""
    return [
        tp
        for tp in divisors(gpus)
        if tp <= cluster.gpus_per_node
        and model.num_heads % tp == 0
        and model.num_kv_heads % tp == 0
        and model.intermediate_size % tp == 0
    ]


def _expert_sizes(model: ModelConfig, dp: int) -> list[int]:
    return [1] if model.moe is None else [ep for ep in divisors(dp) if model.moe.num_experts % ep == 0]


def _can_run(workload: Workload, x: Layouts, hybrid: NDArray[np.int64]) -> NDArray[np.bool_]:
    per_rank = workload.batch // x.dp
    micro_batches = per_rank // x.micro_batch
    zero_bubble = x.scheduled("zero_bubble")
    runs = per_rank % x.micro_batch == 0
    runs &= (x.zero == 0) | (x.dp > 1)
    runs &= (hybrid == 0) | ((x.shard > 1) & (x.shard < x.dp) & (x.dp % x.shard == 0))
    runs &= (x.pp > 1) | ((x.virtual == 1) & ~zero_bubble)
    if workload.precision == "fp8":  # the trainer rounds whole weights once a step
        runs &= (x.tp * x.cp * x.pp * x.ep == 1) & (x.zero < 3)
    data = x.dp // x.ep
    runs &= (x.zero == 0) | (data % np.minimum(x.shard, data) == 0)
    runs &= (x.cp > 1) | (x.micro_batch * workload.seq % x.tp == 0)
    # ZeRO-2 reduces every micro-batch, ZeRO-1 once: a pipeline has many. The trainer has no ZeRO-3 with a pipeline.
    runs &= (x.pp == 1) | (x.zero < 2)
    runs &= ~(zero_bubble & x.recomputes("selective"))  # nor these two together
    runs &= (x.pp == 1) | (micro_batches >= x.pp)  # 1F1B needs as many micro-batches as stages
    runs &= (x.virtual == 1) | ((micro_batches % x.pp == 0) & (x.pp * x.virtual <= workload.model.num_layers))
    runs &= ~zero_bubble | ((micro_batches >= 2 * x.pp) & (2 * x.pp <= workload.model.num_layers))
    return runs


def _trainer_takes(workload: Workload, x: Layouts) -> NDArray[np.bool_]:
    """What the trainer's own check of model and mesh says: windows and the ring, balance losses and cp, stages, …"""
    keys = np.stack((x.tp, x.cp, x.pp, x.ep, x.virtual, x.schedule))
    found, each = np.unique(keys, axis=1, return_inverse=True)
    taken = [_takes(workload.model, *map(int, column)) for column in found.T]
    return np.array(taken, dtype=bool)[each.reshape(-1)] if taken else np.zeros(0, dtype=bool)


def _takes(model: ModelConfig, tp: int, cp: int, pp: int, ep: int, virtual: int, schedule: int) -> bool:
    kind = SCHEDULES[schedule]
    try:
        check_model_parallel(
            model,
            MeshConfig(tp=tp, cp=cp, pp=pp, ep=ep),
            stages_per_rank=virtual,
            method="ring",
            schedule="interleaved" if kind == "1f1b" and virtual > 1 else kind,
        )
    except ArgumentError:
        return False
    return True
