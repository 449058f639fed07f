"""Bytes per GPU: model states, activations, buffers, and what the allocator and the libraries need.

Activations are those that the stack's kernels keep for the backward (`Software.activation`), of the micro-batches that
a pipeline stage holds at one time. The first stage holds most of them, the last the logits: the larger one counts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagu.nn.config import Rope
from bagu.parallel.planner.cluster import Gpu
from bagu.parallel.planner.layouts import Layouts, Workload, local_parameters, stage_layers
from bagu.parallel.planner.model_cost import LayerCost, ModelCost, model_cost
from bagu.parallel.planner.software import Software

Array = NDArray[np.float64]
# the share of a GPU that a layout leaves free: more would refuse over 5 % of the published runs that fit
FREE = 0.07
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


def room(gpu: Gpu) -> float:
    """Bytes that a layout may need on a GPU."""
    return (1 - FREE) * gpu.memory_gib * 2**30


def memory(workload: Workload, software: Software, x: Layouts) -> Memory:
    cost = model_cost(workload.model)
    dense, experts = local_parameters(cost, x, software.stages)
    shard = (x.shard * x.cp).astype(float)
    expert_shard = np.maximum(shard * x.tp / x.ep, 1)
    tokens = x.micro_batch * (workload.seq / x.cp)

    def states(bytes_each: float, from_stage: int) -> Array:
        divided = x.zero >= from_stage
        return bytes_each * (dense / np.where(divided, shard, 1) + experts / np.where(divided, expert_shard, 1))

    activations, logits = _activations(workload, cost, software, x, tokens)
    buffers = logits + _gathered(cost, software, x) + _working(workload, cost, x, tokens)
    parts = Memory(
        weights=states(software.weight_bytes, 3) + fp8_weights(workload, software, cost),
        gradients=states(software.stored_gradient_bytes, 2),
        optimizer=states(software.optimizer_bytes, 1),
        activations=activations,
        buffers=buffers,
        overhead=np.zeros_like(buffers),
    )
    overhead = software.context_gib * 2**30 + software.fragmentation * parts.allocated
    return Memory(**{**vars(parts), "overhead": overhead})


def fp8_weights(workload: Workload, software: Software, cost: ModelCost) -> float:
    """Bytes of the linear layers' weights in fp8 and of their transposes, beside the 16-bit copy."""
    return 2.0 * cost.linear_parameters if workload.precision == "fp8" and software.keeps_fp8 else 0.0


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


class _Saved(NamedTuple):
    """Bytes per token that a layer saves for its backward."""

    stream: float  # inputs of norms and products, as wide as the hidden state: divided by sequence parallelism only
    inner: float  # inside attention and FFN: divided by tensor parallelism
    scores: float  # the square of unfused attention
    products: float  # the part of `inner` that matrix products and attention return


def _saved(workload: Workload, software: Software, layer: LayerCost) -> _Saved:
    config, moe, stack = workload.model, layer.moe, software.activation
    h, H, G = config.hidden_size, config.num_heads, config.num_kv_heads
    unfused = software.attention == "unfused"
    qkv = H * config.head_dim + G * (config.head_dim + config.v_dim)
    out = H * config.v_dim
    # eager norms copy to fp32
    stream = {"bagu": 8, "compiled": 8, "megatron": 10 if unfused else 8, "eager": 16}[stack]
    if stack == "eager" and isinstance(config.positions, Rope):
        rotated = 2.0 * qkv  # RoPE's results beside its inputs
    elif stack == "bagu" and config.qk_norm:
        rotated = 2.0 * qkv - G * config.v_dim  # values are a view of the product that the norms keep
    else:
        rotated = float(qkv)
    up, gates = (2, 1) if config.gated else (1, 1)  # results of the first product and of the activation
    silu = 1 if stack == "eager" and config.gated else 0
    dense = config.intermediate_size if moe is None else moe.expert_size * moe.num_shared
    routed = 0 if moe is None else moe.top_k * moe.expert_size
    copies = 0 if moe is None else 2 * moe.top_k * h  # tokens sorted by expert, and the experts' results
    attention = 2 * rotated + 2 * out + 4 * H  # and the logsumexp
    ffn = 2 * (up + gates + silu) * dense + 2 * (up + gates) * routed + 2 * copies
    products = 2 * qkv + 2 * up * dense + 2 * (up + gates) * routed + 2 * copies
    if workload.precision == "fp8" and software.keeps_fp8:  # of inputs of products; attention keeps its result too
        stream, attention, ffn = stream - 2, attention + out, ffn - gates * dense
    scores = 5.0 * H * workload.seq if unfused else 0.0  # softmax, dropout and its mask (Korthikanti et al.)
    return _Saved(stream=float(stream * h), inner=attention + ffn, scores=scores, products=products + 2 * out)


def _kept(workload: Workload, software: Software, layer: LayerCost, x: Layouts) -> tuple[Array, Array]:
    """(bytes per token that a layer keeps, bytes per token that exist once while a layer is recomputed)."""
    saved = _saved(workload, software, layer)
    h = workload.model.hidden_size
    divided = np.where(x.sequence_parallel == 1, x.tp, 1)
    everything = saved.stream / divided + (saved.inner + saved.scores) / x.tp
    if software.selective == "attention":
        selective = saved.stream / divided + saved.inner / x.tp
    else:  # products (or half of them) and attention are kept, the rest is computed again
        out = 2 * workload.model.num_heads * workload.model.v_dim
        share = 0.5 if software.selective == "half" else 1.0
        selective = (2 + 2 * share) * h / divided + (share * (saved.products - out) + out) / x.tp
    block = 2 * h / divided
    kept = np.select([x.recomputes("none"), x.recomputes("selective")], [everything, selective], block)
    return kept, np.where(x.recomputes("full"), everything, 0.0)


def _gathered(cost: ModelCost, software: Software, x: Layouts) -> Array:
    """ZeRO-3: the weights of the current and the next layer, and the gradient of one."""
    layer = max(one.sharded + one.replicated for one in cost.layers) / x.tp
    largest = np.maximum(layer, np.maximum(cost.head, cost.embedding) / x.tp)
    return np.where(x.zero == 3, 2.0 * (layer + largest) + software.stored_gradient_bytes * largest, 0.0)


def _working(workload: Workload, cost: ModelCost, x: Layouts, tokens: Array) -> Array:
    """Temporary tensors of the backward of one layer: the gradient of the widest activation and of its input."""
    wide = max(
        max(linear.n if linear.split == "columns" else linear.k for linear in one.linears) for one in cost.layers
    )
    return 2.0 * tokens * (wide / x.tp + workload.model.hidden_size)
