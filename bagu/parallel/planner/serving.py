"""Plan a serving deployment: tensor parallelism, batch size, KV room and replicas for a request rate and latencies.

One replica of `tp` GPUs alternates decode steps of a batch of B sequences with prefills. In equilibrium, with p seconds
of prefill per request, t(B) seconds per decode step and N output tokens,

    requests per second   r = B / (N · t(B) + B · p)
    time per output token     t(B) / (1 - r · p)         prefills run between decode steps
    time to first token       p + r · p² / (2 (1 - r · p))   and the queue for them, as M/D/1

The plan takes the largest batch that meets both targets and whose KV cache fits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagu.errors import ArgumentError, UnknownName
from bagu.machine.terminal import counted
from bagu.nn.config import ModelConfig
from bagu.nn.count import kv_bytes
from bagu.parallel.planner import collectives as comm
from bagu.parallel.planner import kernels
from bagu.parallel.planner.calibration import CALIBRATION, Calibration
from bagu.parallel.planner.cluster import Cluster
from bagu.parallel.planner.model_cost import Linear, ModelCost, model_cost
from bagu.parallel.planner.search import divisors

Array = NDArray[np.float64]
GiB = 2**30
USABLE = 0.9  # share of the GPU that weights and KV cache may fill; activations and libraries need the rest
KERNELS_PER_LAYER = 9
WEIGHT_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.53}  # of a quantized weight, with its scale
KERNEL_US = 3.0  # start and end of a small kernel inside a CUDA graph, per kernel
STEP_US = 500.0  # host time between two decode steps: scheduling and sampling
BATCHES = np.unique(np.round(2.0 ** np.arange(0, 10.25, 0.25)))  # 1 to 1024


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """The load and the targets."""

    requests_per_s: float
    input_tokens: int
    output_tokens: int
    token_ms: float  # time per output token
    first_token_ms: float = 1000.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ArgumentError(f"{name} is {value}", hint="give more than 0")


@dataclass(frozen=True, kw_only=True)
class Deployment:
    tp: int
    batch: int  # sequences that decode together
    kv_tokens: int  # tokens that the KV cache of a replica holds
    requests_per_s: float  # of one replica
    token_ms: float
    first_token_ms: float
    replicas: int
    usd_per_million_tokens: float  # of output

    @property
    def gpus(self) -> int:
        return self.tp * self.replicas


@dataclass(frozen=True, kw_only=True)
class BatchTimes:
    """Predicted seconds of a batch of requests."""

    prefill_s: float  # of all prompts
    decode_s: Array  # of each decode step

    @property
    def total_s(self) -> float:
        return self.prefill_s + float(self.decode_s.sum())

    @property
    def step_s(self) -> float:
        """The median step."""
        return float(np.median(self.decode_s))


def deployments(
    model: ModelConfig,
    cluster: Cluster,
    traffic: Traffic,
    calibration: Calibration = CALIBRATION,
    *,
    gpus: int | None = None,
    quantization: str | None = None,
) -> list[Deployment]:
    """The best batch for every tensor-parallel size that meets the targets, fewest GPUs first.

    `gpus` is the most that there are; `quantization` is how weights of linear layers are stored.
    """
    if quantization is not None:
        UnknownName.check("quantization", quantization, WEIGHT_BYTES)
    cost, weight_bytes = model_cost(model), 2.0 if quantization is None else WEIGHT_BYTES[quantization]
    sizes = [tp for tp in divisors(cluster.gpus_per_node) if model.num_heads % tp == 0]
    found, reasons = [], []
    for tp in sizes:
        one = _deployment(cost, cluster, traffic, tp, calibration, weight_bytes)
        if isinstance(one, Deployment):
            found.append(one)
        else:
            reasons.append(one)
    if not found:
        raise ArgumentError(
            f"no deployment on {cluster.gpu.name} meets {traffic.token_ms:g} ms per token and "
            f"{traffic.first_token_ms:g} ms to the first: {'; '.join(reasons)}",
            hint="allow more latency, shorten the prompts, or use a GPU with more memory or bandwidth",
        )
    found.sort(key=lambda d: (d.gpus, d.token_ms))
    enough = [d for d in found if gpus is None or d.gpus <= gpus]
    if not enough:
        least = found[0]
        raise ArgumentError(
            f"{traffic.requests_per_s:g} requests/s need {least.gpus} GPUs ({counted(least.replicas, 'replica')} of tp "
            f"{least.tp}), and --gpus is {gpus}",
            hint=f"{gpus // least.tp * least.requests_per_s:.3g} requests/s are possible on {gpus}, or use more"
            if gpus is not None and gpus >= least.tp
            else "use more GPUs",
        )
    return enough


def _deployment(
    cost: ModelCost, cluster: Cluster, traffic: Traffic, tp: int, c: Calibration, weight_bytes: float
) -> Deployment | str:
    """The deployment, or why there is none."""
    model = cost.config
    ends = cost.embedding + (0 if model.tie_embeddings else cost.head)  # stay in 16 bits
    weights = (2.0 * ends + weight_bytes * (cost.parameters - ends)) / tp
    share = tp if model.mla is None else 1  # the latent of MLA is not divided
    length = traffic.input_tokens + traffic.output_tokens
    per_token = kv_bytes(model, context=length) / min(share, model.num_kv_heads)
    room = USABLE * cluster.gpu.memory_gib * GiB - weights
    if room < per_token * length:
        return f"tp {tp} has no room for one sequence beside {weights / GiB:.0f} GiB of weights"
    kv_tokens = int(room / max(per_token, 1))
    mean = traffic.input_tokens + traffic.output_tokens / 2
    batches = BATCHES[BATCHES * mean <= kv_tokens]
    prefill = float(
        _forward_s(cost, cluster, tp, np.array([float(traffic.input_tokens)]), traffic.input_tokens, c, weight_bytes)[0]
    )
    decode = _decode_s(cost, cluster, tp, batches, batches * mean * per_token, c, weight_bytes)
    rate = batches / (traffic.output_tokens * decode + batches * prefill)
    busy = rate * prefill
    token_ms = 1000 * decode / (1 - busy)
    first_ms = 1000 * (prefill + busy * prefill / (2 * (1 - busy)))
    meets = (token_ms <= traffic.token_ms) & (first_ms <= traffic.first_token_ms)
    if not meets.any():
        return f"tp {tp} takes {token_ms.min():.3g} ms per token and {first_ms.min():.3g} ms to the first"
    i = int(np.flatnonzero(meets)[np.argmax(rate[meets])])
    replicas = math.ceil(traffic.requests_per_s / rate[i] - 1e-9)
    hourly = replicas * tp * cluster.gpu.usd_per_hour
    tokens = traffic.requests_per_s * traffic.output_tokens * 3600
    return Deployment(
        tp=tp,
        batch=int(batches[i]),
        kv_tokens=kv_tokens,
        requests_per_s=float(rate[i]),
        token_ms=float(token_ms[i]),
        first_token_ms=float(first_ms[i]),
        replicas=replicas,
        usd_per_million_tokens=1e6 * hourly / tokens,
    )


def batch_times(
    model: ModelConfig, cluster: Cluster, inputs: Sequence[int], outputs: Sequence[int], c: Calibration = CALIBRATION
) -> BatchTimes:
    """One GPU with these requests, which all start at once: the work that `bagu bench engine` measures."""
    cost, prompts, lengths = model_cost(model), np.array(inputs, dtype=float), np.array(outputs)
    steps = np.arange(1, lengths.max())  # the first token comes from the prefill
    running = lengths > steps[:, None]  # [steps, requests]
    cached = ((prompts + steps[:, None]) * running).sum(1)
    prefill = sum(_forward_s(cost, cluster, 1, np.array([n]), int(n), c)[0] for n in prompts)
    decode = _decode_s(cost, cluster, 1, running.sum(1).astype(float), cached * kv_bytes(model), c)
    return BatchTimes(prefill_s=float(prefill), decode_s=decode)


def _decode_s(
    cost: ModelCost,
    cluster: Cluster,
    tp: int,
    batch: Array,
    cache_bytes: Array,
    c: Calibration,
    weight_bytes: float = 2.0,
) -> Array:
    """One step of `batch` sequences: products with few rows, and every cached key and value read once."""
    cache = kernels.memory_s(cluster.gpu, c, cache_bytes)
    small = cost.config.num_layers * KERNELS_PER_LAYER * KERNEL_US * 1e-6 + STEP_US * 1e-6
    return _products_s(cost, cluster, tp, batch, c, weight_bytes) + cache + small


def _forward_s(
    cost: ModelCost, cluster: Cluster, tp: int, tokens: Array, length: int, c: Calibration, weight_bytes: float = 2.0
) -> Array:
    """A prefill of `tokens` tokens."""
    kernel: kernels.AttentionKernel = "flash3"
    flops = tokens * cost.attention_flops(length) * cost.config.num_layers / tp
    attention, _ = kernels.attention_s(cluster.gpu, kernel, flops, float(length), cost.config.v_dim)
    return _products_s(cost, cluster, tp, tokens, c, weight_bytes) + attention


def _products_s(cost: ModelCost, cluster: Cluster, tp: int, rows: Array, c: Calibration, weight_bytes: float) -> Array:
    """All products of a forward with `rows` rows, and the all-reduces between them."""
    model, seconds = cost.config, np.zeros_like(rows)
    for layer in cost.layers:
        for linear in layer.linears:
            seconds = seconds + layer.count * _linear_s(cluster, linear, tp, rows, c, weight_bytes=weight_bytes)
        if layer.moe is not None:
            used = np.minimum(layer.moe.num_experts, rows * layer.moe.top_k)  # experts that get a token
            each = rows * layer.moe.top_k / used
            for linear in layer.experts:
                one = _linear_s(cluster, linear, 1, each, c, batch=used / tp, weight_bytes=weight_bytes)
                seconds = seconds + layer.count * one
    head = Linear(n=model.vocab_size, k=model.hidden_size, split="columns")
    seconds = seconds + _linear_s(cluster, head, tp, rows, c)
    ranks = np.full_like(rows, float(tp))
    group = comm.group(cluster, ranks, np.ones_like(rows))
    reduce = comm.all_reduce_s(cluster, c, group, 2.0 * rows * model.hidden_size)
    return seconds + 2 * model.num_layers * reduce


def _linear_s(
    cluster: Cluster,
    linear: Linear,
    tp: int,
    rows: Array,
    c: Calibration,
    batch: Array | float = 1.0,
    weight_bytes: float = 2.0,
) -> Array:
    n = np.full_like(rows, math.ceil(linear.n / tp) if linear.split == "columns" else linear.n)
    k = np.full_like(rows, math.ceil(linear.k / tp) if linear.split == "rows" else linear.k)
    return kernels.matmul_s(cluster.gpu, c, rows, n, k, batch=batch, weight_bytes=weight_bytes)
