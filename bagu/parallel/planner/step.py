"""The time of a training step: micro-batches through the pipeline, gradient reduction, optimizer.

    step = m · t_slowest + (sum of stages - t_slowest) / v  +  sends  +  exposed data-parallel traffic  +  optimizer

m micro-batches, v stages per rank; the second term is the bubble of 1F1B and interleaved 1F1B with unequal stages.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from bagu.parallel.planner import collectives as comm
from bagu.parallel.planner import kernels
from bagu.parallel.planner.calibration import CALIBRATION, Calibration
from bagu.parallel.planner.cluster import Cluster
from bagu.parallel.planner.layer_time import Setting, Time, head_time, hidden, layer_time
from bagu.parallel.planner.layouts import Layouts, Workload, local_parameters, stage_layers
from bagu.parallel.planner.model_cost import model_cost
from bagu.parallel.planner.software import Software

Array = NDArray[np.float64]
ZERO_BUBBLE = 1 / 6  # bubble of ZBV relative to 1F1B, simulated with torch's schedules: 6.2 of 37.5 % (p=4, m=8)
ADAM_BYTES = 30.0  # read and written per parameter: gradient, weight, two moments, 16-bit copy


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by cause."""

    compute: Array
    recompute: Array
    tp: Array
    cp: Array
    ep: Array
    bubble: Array
    p2p: Array
    dp: Array
    optimizer: Array
    host: Array

    @property
    def total(self) -> Array:
        return np.sum([getattr(self, field.name) for field in fields(self)], axis=0)


def step_time(
    workload: Workload, cluster: Cluster, software: Software, layouts: Layouts, calibration: Calibration = CALIBRATION
) -> StepTime:
    s = Setting(
        workload=workload,
        cost=model_cost(workload.model),
        cluster=cluster,
        software=software,
        calibration=calibration,
        layouts=layouts,
    )
    (forward, backward), head = _layer_and_head(s)
    most, last = stage_layers(s.cost, layouts.pp, software.stages)
    middle = forward + backward
    end = head[0] + head[1]
    slow_end = (last * middle.total + end.total) >= most * middle.total
    layers = np.where(slow_end, last, most)
    slowest = middle * layers + end * slow_end.astype(float)
    micro_batches = workload.batch / (layouts.dp * layouts.micro_batch)
    whole = workload.model.num_layers * middle.total + end.total
    fill = np.maximum(whole - slowest.total, 0) / layouts.virtual
    bubble = np.where(layouts.scheduled("zero_bubble"), ZERO_BUBBLE * fill, fill)
    steady = slowest * micro_batches
    window_f = layers * forward.total + head[0].total * slow_end
    window_b = layers * backward.total + head[1].total * slow_end
    return StepTime(
        compute=steady.compute,
        recompute=steady.recompute,
        tp=steady.tp,
        cp=steady.cp,
        ep=steady.ep,
        bubble=bubble,
        p2p=_sends(s, micro_batches),
        dp=_data_parallel(s, window_f, window_b, micro_batches),
        optimizer=_optimizer(s),
        host=steady.host + calibration.step_ms * 1e-3 * (layouts.dp * layouts.tp * layouts.pp * layouts.cp > 1),
    )


def _layer_and_head(s: Setting) -> tuple[tuple[Time, Time], tuple[Time, Time]]:
    """The times of a mean layer and of the head. They depend on few fields of a layout, so many layouts share them."""
    x = s.layouts
    keys = np.stack((x.tp, x.cp, x.ep, x.micro_batch, x.recompute, x.sequence_parallel))
    _, first, each = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    few = replace(s, layouts=x.where(first))
    index = each.reshape(-1)  # numpy 2.0 returns it with another shape

    def spread(pair: tuple[Time, Time]) -> tuple[Time, Time]:
        return pair[0].where(index), pair[1].where(index)

    return spread(_mean_layer(few)), spread(head_time(few))


def _mean_layer(s: Setting) -> tuple[Time, Time]:
    total = s.workload.model.num_layers
    pairs = [(layer.count / total, layer_time(s, layer)) for layer in s.cost.layers]
    (share, (forward, backward)), *rest = pairs
    forward, backward = forward * share, backward * share
    for share, (f, b) in rest:
        forward, backward = forward + f * share, backward + b * share
    return forward, backward


def _sends(s: Setting, micro_batches: Array) -> Array:
    """Activations to the next stage and gradients back, for every micro-batch and virtual stage."""
    x = s.layouts
    share = x.tp if s.software.scatter_p2p else 1
    size = 2.0 * s.tokens * s.workload.model.hidden_size / share
    stride = (x.tp * x.cp * x.dp).astype(float)
    one = comm.send_s(s.cluster, s.calibration, size, stride)
    exposed = s.calibration.interference if s.software.overlap_p2p else 1.0
    stages = np.where(x.scheduled("zero_bubble"), 2, x.virtual)  # ZBV has two stages per rank
    count = 2 * (micro_batches * stages * exposed + x.pp - 1)
    return np.where(x.pp > 1, count * one, 0.0)


def _data_parallel(s: Setting, window_f: Array, window_b: Array, micro_batches: Array) -> Array:
    c, cluster, software, x = s.calibration, s.cluster, s.software, s.layouts
    dense, experts = local_parameters(s.cost, x, software.stages)
    overlaps = (software.overlap_gradients and not software.blocking_launches) & (
        (x.pp == 1) | software.overlap_with_pipeline
    )
    prefetches = software.overlap_parameters and not software.blocking_launches
    publishes = prefetches and software.overlap_publish
    seconds = np.zeros_like(dense)
    replicas = (x.dp * x.cp).astype(float)
    for parameters, ranks, stride in (
        (dense, replicas, x.tp.astype(float)),
        (experts, np.maximum(replicas * x.tp / x.ep, 1), x.ep.astype(float)),
    ):
        everywhere = comm.group(cluster, ranks, stride)
        sharded = comm.group(cluster, np.clip(ranks * x.shard / x.dp, 1, None), stride)
        outer = comm.group(cluster, np.maximum(x.dp / x.shard, 1.0), stride * sharded.size)
        gradient = parameters * software.gradient_bytes
        weight = 2.0 * parameters
        calls = np.where(
            x.zero == 3, s.workload.model.num_layers / x.pp, np.ceil(gradient / (software.bucket_mb * 1e6))
        )
        reduce = comm.all_reduce_s(cluster, c, everywhere, gradient, calls=calls)
        scatter = comm.all_gather_s(cluster, c, sharded, gradient, one_rail=software.one_rail, calls=calls)
        gather = comm.all_gather_s(cluster, c, sharded, weight, one_rail=software.one_rail, calls=calls)
        across = hidden(c, comm.all_reduce_s(cluster, c, outer, gradient / sharded.size), window_b, overlaps)
        once = hidden(c, scatter, window_b, overlaps) + hidden(c, gather, window_f, publishes)
        each = hidden(c, scatter + gather, window_b, overlaps) + hidden(c, gather, window_f, prefetches)
        two = micro_batches * (hidden(c, scatter, window_b, overlaps) + hidden(c, gather, window_f, publishes))
        by_stage = [hidden(c, reduce, window_b, overlaps), once + across, two + across, micro_batches * each + across]
        seconds = seconds + np.select([x.zero == stage for stage in range(4)], by_stage)
    return seconds + _tied(s)


def _tied(s: Setting) -> Array:
    """The first and the last stage add the gradients of a shared embedding."""
    x = s.layouts
    if not s.workload.model.tie_embeddings:
        return np.zeros(len(x))
    pair = comm.group(s.cluster, np.full(len(x), 2.0), (x.tp * x.cp * x.dp).astype(float))
    size = s.software.gradient_bytes * s.cost.head / x.tp
    return np.where(x.pp > 1, comm.all_reduce_s(s.cluster, s.calibration, pair, size), 0.0)


def _optimizer(s: Setting) -> Array:
    dense, experts = local_parameters(s.cost, s.layouts, s.software.stages)
    shard = np.where(s.layouts.zero > 0, s.layouts.shard * s.layouts.cp, 1)
    expert_shard = np.where(s.layouts.zero > 0, np.maximum(shard * s.layouts.tp / s.layouts.ep, 1), 1)
    traffic = ADAM_BYTES * (dense / shard + experts / expert_shard)
    if s.workload.precision == "fp8" and s.software.keeps_fp8:
        traffic = traffic + s.software.fp8_cast_bytes * s.cost.linear_parameters
    return kernels.memory_s(s.cluster.gpu, s.calibration, traffic)
