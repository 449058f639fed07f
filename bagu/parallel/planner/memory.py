"""Bytes per GPU: model states, activations, buffers, and what the allocator and the libraries need.

Activations are those that the stack's kernels keep for the backward (`Software.activation`), of the micro-batches that
a pipeline stage holds at one time. The first stage holds most of them, the last the logits: the larger one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagu.parallel.planner.cluster import Cluster
from bagu.parallel.planner.layouts import Layouts, Workload
from bagu.parallel.planner.model_cost import LayerCost, ModelCost, model_cost
from bagu.parallel.planner.parameters import local_parameters, stage_layers
from bagu.parallel.planner.software import Software

__all__ = ["Memory", "memory"]

Array = NDArray[np.float64]
HEAD_CHUNK = 2.0**31  # bytes of fp32 logits that bagu's chunked head has at one time


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the GPU that needs most."""

    weights: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array  # gathered weights, logits, communication
    overhead: Array  # CUDA context, libraries, fragmentation

    @property
    def allocated(self) -> Array:
        """What the allocator hands out: torch.cuda.max_memory_allocated."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def total(self) -> Array:
        return self.allocated + self.overhead


def memory(workload: Workload, cluster: Cluster, software: Software, x: Layouts) -> Memory:
    cost = model_cost(workload.model)
    dense, experts = local_parameters(cost, x, software.stages)
    shard = (x.shard * x.cp).astype(float)
    expert_shard = np.maximum(shard * x.tp / x.ep, 1)
    tokens = x.micro_batch * (workload.seq / x.cp)

    def states(bytes_each: float, from_stage: int) -> Array:
        divided = x.zero >= from_stage
        return bytes_each * (dense / np.where(divided, shard, 1) + experts / np.where(divided, expert_shard, 1))

    activations, logits = _activations(workload, cost, software, x, tokens)
    buffers = logits + _gathered(cost, software, x) + _working(workload, cost, software, x, tokens)
    parts = Memory(
        weights=states(software.weight_bytes, 3),
        gradients=states(software.stored_gradient_bytes, 2),
        optimizer=states(software.optimizer_bytes, 1),
        activations=activations,
        buffers=buffers,
        overhead=np.zeros_like(buffers),
    )
    overhead = software.context_gib * 2**30 + software.fragmentation * parts.allocated
    return Memory(**{**vars(parts), "overhead": overhead})


def _activations(
    workload: Workload, cost: ModelCost, software: Software, x: Layouts, tokens: Array
) -> tuple[Array, Array]:
    """(bytes that layers and embedding keep, bytes of logits and their gradient), of the stage that needs most."""
    config = workload.model
    per_layer, whole_layer = np.zeros(len(x)), np.zeros(len(x))
    for layer in cost.layers:
        kept, once = _kept(workload, software, layer, x)
        per_layer = per_layer + kept * layer.count / config.num_layers
        whole_layer = np.maximum(whole_layer, once)
    most, last = stage_layers(cost, x.pp, software.stages)
    micro_batches = workload.batch / (x.dp * x.micro_batch)
    in_flight = np.minimum(micro_batches, x.pp)
    held = np.where(x.virtual > 1, in_flight * (1 + (x.pp - 1) / (x.pp * x.virtual)), in_flight)
    share = np.where(x.sequence_parallel == 1, x.tp, 1)
    ends = 2 * 2 * config.hidden_size / share  # the embedding's output, the head's input
    logits = tokens * software.logit_bytes * config.vocab_size / x.tp
    if software.logit_bytes == 0:
        rows = 4.0 * tokens * config.vocab_size / x.tp
        logits = np.minimum(rows, HEAD_CHUNK) + 4.0 * config.vocab_size * config.hidden_size / x.tp
    recomputed = tokens * whole_layer
    first = tokens * (held * most * per_layer + in_flight * ends / 2) + recomputed
    final = tokens * (np.maximum(last, 0) * per_layer + ends) + recomputed
    single = x.pp == 1
    final_is_larger = single | (final + logits > first)
    return np.where(final_is_larger, final, first), np.where(final_is_larger, logits, 0.0)


def _kept(workload: Workload, software: Software, layer: LayerCost, x: Layouts) -> tuple[Array, Array]:
    """(bytes per token that a layer keeps, bytes per token that exist once while a layer is recomputed)."""
    config = workload.model
    h, H, G = config.hidden_size, config.num_heads, config.num_kv_heads
    qkv = H * config.head_dim + G * (config.head_dim + config.v_dim)
    out = H * config.v_dim
    wide = config.intermediate_size if layer.moe is None else layer.moe.expert_size * layer.moe.num_shared
    routed = 0 if layer.moe is None else layer.moe.top_k
    per_ffn = 3 if config.gated else 2  # gate and up, and their product; or up and the activation
    stream, copies, square = {
        "bagu": (8.0, 2.0 if config.qk_norm else 1.0, 0.0),
        "megatron": (
            10.0 if software.attention == "unfused" else 8.0,
            1.0,
            5.0 if software.attention == "unfused" else 0,
        ),
        "eager": (16.0, 2.0, 0.0),
        "compiled": (8.0, 1.0, 0.0),
    }[software.activation]
    if software.activation == "bagu" and config.qk_norm:
        copies = 2.0 - G * config.v_dim / qkv  # values are a view of the product that the norms keep
    extra = 2.0 * wide if software.activation == "eager" and config.gated else 0.0  # SiLU's result
    attention = 2 * qkv * copies + 2 * out + 4 * H
    ffn = 2 * per_ffn * wide + extra
    experts = routed * (2 * h + 2 * per_ffn * (0 if layer.moe is None else layer.moe.expert_size) + 2 * h)
    scores = square * H * workload.seq if software.attention == "unfused" else 0.0
    inner = (attention + ffn + scores) / x.tp + experts / x.tp
    replicated = stream * h / np.where(x.sequence_parallel == 1, x.tp, 1)
    everything = replicated + inner
    if software.selective == "attention":
        selective = replicated + (attention + ffn) / x.tp + experts / x.tp
    else:  # products (or half of them) and attention are kept, the rest is computed again
        share = 0.5 if software.selective == "half" else 1.0
        products = share * (2 * qkv + 2 * (per_ffn - 1) * wide + experts) + 2 * out
        selective = (2 + 2 * share) * h / np.where(x.sequence_parallel == 1, x.tp, 1) + products / x.tp
    block = 2 * h / np.where(x.sequence_parallel == 1, x.tp, 1)
    kept = np.select([x.recompute == 0, x.recompute == 1], [everything + 0 * block, selective + 0 * block], block)
    once = np.where(x.recompute == 2, everything, 0.0)
    return kept, once


def _gathered(cost: ModelCost, software: Software, x: Layouts) -> Array:
    """ZeRO-3: the weights of the current and the next layer, and the gradient of one."""
    layer = max(one.sharded + one.replicated for one in cost.layers) / x.tp
    largest = np.maximum(layer, np.maximum(cost.head, cost.embedding) / x.tp)
    return np.where(x.zero == 3, 2.0 * (layer + largest) + software.stored_gradient_bytes * largest, 0.0)


def _working(workload: Workload, cost: ModelCost, software: Software, x: Layouts, tokens: Array) -> Array:
    """Temporary tensors of the backward of one layer: the gradient of the widest activation and of its input."""
    wide = max(
        max(linear.n if linear.split == "columns" else linear.k for linear in one.linears) for one in cost.layers
    )
    return 2.0 * tokens * (wide / x.tp + workload.model.hidden_size)
