"""Seconds of one micro-batch in one layer, and in the head: products, attention, elementwise kernels, communication
inside the layer (TP, CP, EP), and the time by which the host is late with its launches."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from bagu.parallel.planner import collectives as comm
from bagu.parallel.planner import kernels
from bagu.parallel.planner.calibration import Calibration
from bagu.parallel.planner.cluster import Cluster
from bagu.parallel.planner.layouts import Layouts, Workload
from bagu.parallel.planner.model_cost import LayerCost, Linear, ModelCost
from bagu.parallel.planner.software import Software

Array = NDArray[np.float64]
BLOCKING_US = 30.0  # an eager operation that waits for its kernel: none of its host time (10 to 20 µs) is hidden


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The arguments of every function here."""

    workload: Workload
    cost: ModelCost
    cluster: Cluster
    software: Software
    calibration: Calibration
    layouts: Layouts

    @property
    def tokens(self) -> Array:
        """Of a micro-batch on one context-parallel rank."""
        return self.layouts.micro_batch * (self.workload.seq / self.layouts.cp)

    def tp_group(self) -> comm.Group:
        tp = self.layouts.tp.astype(float)
        return comm.group(self.cluster, tp, np.ones_like(tp))


@dataclass(frozen=True, kw_only=True)
class Time:
    """Seconds by cause. Communication is the part that computation does not hide."""

    compute: Array
    recompute: Array
    tp: Array
    cp: Array
    ep: Array
    host: Array

    @property
    def total(self) -> Array:
        return self.compute + self.recompute + self.tp + self.cp + self.ep + self.host

    def where(self, index: NDArray[np.int64]) -> Time:
        return Time(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def __add__(self, other: Time) -> Time:
        return Time(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def __mul__(self, factor: Array | float) -> Time:
        return Time(**{f.name: getattr(self, f.name) * factor for f in fields(self)})


def hidden(c: Calibration, seconds: Array, window: Array, overlaps: bool | NDArray[np.bool_]) -> Array:
    """The cost of a collective that may run during `window` seconds of computation."""
    return np.where(overlaps, np.maximum(seconds - window, c.interference * seconds), seconds)


def layer_time(s: Setting, layer: LayerCost) -> tuple[Time, Time]:
    """Forward and backward of one layer; the backward includes recomputation."""
    forward, backward = _products(s, layer)
    attention_f, attention_b = _attention(s)
    stream_f = _elementwise(s, layer)
    compute_f = forward + attention_f + stream_f
    compute_b = backward + attention_b + 2 * stream_f
    tp_f = _tensor_parallel(s, layer)
    cp_f, cp_b = _context_parallel(s, attention_f, attention_b)
    ep_f = _expert_parallel(s, layer)
    full, selective = s.layouts.recomputes("full"), s.layouts.recomputes("selective")
    core = {"attention": attention_f, "half": 0.5 * compute_f, "elementwise": stream_f}[s.software.selective]
    again = np.where(full, compute_f, np.where(selective, core, 0.0))
    none = np.zeros_like(compute_f)
    first = Time(compute=compute_f, recompute=none, tp=tp_f, cp=cp_f, ep=ep_f, host=none)
    second = Time(
        compute=compute_b, recompute=again, tp=tp_f * (1 + full), cp=cp_b + cp_f * full, ep=ep_f * (1 + full), host=none
    )
    launches = s.software.kernels_per_layer
    return _with_host(s, first, launches), _with_host(s, second, np.where(full, 3.0, 2.0) * launches)


def head_time(s: Setting) -> tuple[Time, Time]:
    """Forward and backward of the head and the loss."""
    config = s.workload.model
    head = Linear(n=config.vocab_size, k=config.hidden_size, split="columns")
    forward, backward = _linear(s, head, s.tokens, tp=s.layouts.tp, precision="bf16")
    logits = kernels.memory_s(
        s.cluster.gpu, s.calibration, s.software.head_bytes * s.tokens * config.vocab_size / s.layouts.tp
    )
    # A third of the bytes moves in the forward, as for every elementwise kernel here. The share only sets which
    # collectives these seconds can hide: from 0 to 1 it changes 10 of the 386 published rows, by at most 0.5 %.
    none = np.zeros_like(forward)
    first = Time(compute=forward + logits / 3, recompute=none, tp=none, cp=none, ep=none, host=none)
    second = Time(compute=backward + 2 * logits / 3, recompute=none, tp=none, cp=none, ep=none, host=none)
    return first, second


def _with_host(s: Setting, time: Time, launches: Array | int) -> Time:
    if s.software.blocking_launches:
        late = launches * BLOCKING_US * 1e-6 + 0 * time.compute
    else:
        late = np.maximum(launches * s.calibration.launch_us * 1e-6 - time.total, 0)
    return Time(**{f.name: late if f.name == "host" else getattr(time, f.name) for f in fields(time)})


def _products(s: Setting, layer: LayerCost) -> tuple[Array, Array]:
    forward = backward = np.zeros_like(s.tokens)
    tp = s.layouts.tp
    for linear in layer.linears:
        f, b = _linear(s, linear, s.tokens, tp=tp, precision=s.workload.precision)
        forward, backward = forward + f, backward + b
    moe = layer.moe
    if moe is not None:
        local = np.maximum(moe.num_experts / s.layouts.ep, 1)  # experts of a rank; each gets an equal share of tokens
        tokens = s.tokens / tp * moe.top_k / local
        for linear in layer.experts:
            f, b = _linear(s, linear, tokens, tp=np.ones_like(tp), precision=s.workload.precision, batch=local)
            forward, backward = forward + f, backward + b
        sort = kernels.memory_s(s.cluster.gpu, s.calibration, 12.0 * s.tokens / tp * moe.top_k * layer.linears[0].k)
        forward, backward = forward + sort, backward + 2 * sort
    local_parameters = layer.sharded / tp + layer.replicated + layer.expert_parameters / s.layouts.ep
    added = kernels.memory_s(s.cluster.gpu, s.calibration, s.software.accumulate_bytes * local_parameters)
    return forward, backward + added


def _linear(
    s: Setting,
    linear: Linear,
    tokens: Array,
    *,
    tp: NDArray[np.int64],
    precision: kernels.Precision,
    batch: Array | float = 1.0,
) -> tuple[Array, Array]:
    gpu, c = s.cluster.gpu, s.calibration
    n = np.ceil(linear.n / tp) if linear.split == "columns" else np.full_like(tokens, linear.n)
    k = np.ceil(linear.k / tp) if linear.split == "rows" else np.full_like(tokens, linear.k)
    forward = kernels.matmul_s(gpu, c, tokens, n, k, batch=batch, precision=precision)
    inputs = kernels.matmul_s(gpu, c, tokens, k, n, batch=batch, precision=precision)
    weights = kernels.matmul_s(gpu, c, n, k, tokens, batch=batch, precision=precision)
    if precision == "fp8":
        forward = forward + kernels.memory_s(gpu, c, s.software.fp8_cast_bytes * batch * tokens * k)
        inputs = inputs + kernels.memory_s(gpu, c, s.software.fp8_cast_bytes * batch * tokens * n)
    return forward, inputs + weights


def _attention(s: Setting) -> tuple[Array, Array]:
    config, tp = s.workload.model, s.layouts.tp
    heads = np.ceil(config.num_heads / tp)
    if s.software.attention == "unfused":
        sequences = s.layouts.micro_batch.astype(float)
        return kernels.unfused_attention_s(
            s.cluster.gpu, s.calibration, sequences, heads, s.workload.seq, config.head_dim
        )
    flops = s.tokens * s.cost.attention_flops(s.workload.seq) * heads / config.num_heads
    length = s.workload.seq / s.layouts.cp
    return kernels.attention_s(s.cluster.gpu, s.software.attention, flops, length, config.v_dim)


def _elementwise(s: Setting, layer: LayerCost) -> Array:
    config, tp = s.workload.model, s.layouts.tp
    stream = s.software.stream_bytes * config.hidden_size / np.where(s.layouts.sequence_parallel == 1, tp, 1)
    wide = sum(x.n if x.split == "columns" else x.k for x in layer.linears if x.split != "none")
    if layer.moe is not None:
        wide += layer.moe.top_k * sum(x.n if x.split == "columns" else x.k for x in layer.experts)
    inner = s.software.inner_bytes * wide / tp
    return kernels.memory_s(s.cluster.gpu, s.calibration, s.tokens * (stream + inner))


def _tensor_parallel(s: Setting, layer: LayerCost) -> Array:
    """An all-reduce per product split by rows, or a reduce-scatter and an all-gather; as many in the backward."""
    size = 2.0 * s.tokens * s.workload.model.hidden_size
    g = s.tp_group()
    reduce = comm.all_reduce_s(s.cluster, s.calibration, g, size)
    pair = 2 * comm.all_gather_s(s.cluster, s.calibration, g, size)
    count = sum(linear.split == "rows" for linear in layer.linears)
    seconds = count * np.where(s.layouts.sequence_parallel == 1, pair, reduce)
    return seconds * (1 - s.calibration.tp_hidden) if s.software.overlap_tp else seconds


def _context_parallel(s: Setting, forward: Array, backward: Array) -> tuple[Array, Array]:
    """Keys and values go around a ring while attention runs; their gradients go with them in the backward."""
    config, cp = s.workload.model, s.layouts.cp.astype(float)
    kv_heads = np.ceil(config.num_kv_heads / s.layouts.tp)
    block = 2.0 * s.tokens * kv_heads * (config.head_dim + config.v_dim)
    g = comm.group(s.cluster, cp, s.layouts.tp.astype(float))
    crosses = np.where(g.local >= g.size, s.layouts.tp, s.cluster.gpus_per_node).astype(float)
    ring = (cp - 1) * comm.send_s(s.cluster, s.calibration, block, crosses) * (cp > 1)
    c = s.calibration
    return hidden(c, ring, forward, True), hidden(c, 2 * ring, backward, True)


def _expert_parallel(s: Setting, layer: LayerCost) -> Array:
    """Tokens go to their experts and back."""
    if layer.moe is None:
        return np.zeros_like(s.tokens)
    ep = s.layouts.ep.astype(float)
    size = 2.0 * s.tokens / s.layouts.tp * layer.moe.top_k * s.workload.model.hidden_size
    g = comm.group(s.cluster, ep, np.ones_like(ep))
    return 2 * comm.all_to_all_s(s.cluster, s.calibration, g, size)
