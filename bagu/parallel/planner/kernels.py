"""Kernel times by shape on one GPU. All functions are vectorized over numpy arrays of shapes.

A matmul is cut into output tiles; the GPU computes one tile per multiprocessor at a time, so its time is the number of
waves of tiles (tile and wave quantization in NVIDIA's matrix multiplication guide,
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication) times the time of a tile, which
has a part that does not depend on K. The library picks the fastest of a few tile sizes and may split K. Attention uses
rates measured by sequence length and head size.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bagu.parallel.planner.calibration import Calibration
from bagu.parallel.planner.cluster import Gpu

Precision = Literal["bf16", "fp8"]
AttentionKernel = Literal["flash1", "flash2", "flash3", "unfused"]
Array = NDArray[np.float64]

# (rows, columns, rate relative to the largest tile): smaller tiles reuse less of what they load
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.7), (64, 64, 0.5))
SPLITS = (1, 2, 4, 8)  # parts of K that different multiprocessors sum up
# every choice of a tile and a split, as columns: [choices, 1]
ROWS, COLUMNS, SPEED, PARTS = (
    np.array(column, dtype=float)[:, None]
    for column in zip(*((*tile, parts) for tile in TILES for parts in SPLITS), strict=True)
)

# Rates (TFLOP/s) of forward and backward of causal attention in bf16 at long sequences with heads of 128, counting half
# the square: FlashAttention-2 (arXiv:2307.08691, figures 4 to 7), FlashAttention-3 (arXiv:2407.08608, figures 5 and 6).
FLASH: dict[tuple[str, str], tuple[float, float]] = {
    ("ampere", "flash1"): (115, 105),
    ("ampere", "flash2"): (200, 170),
    ("ampere", "flash3"): (200, 170),
    ("hopper", "flash1"): (190, 150),
    ("hopper", "flash2"): (350, 300),
    ("hopper", "flash3"): (600, 480),
    ("blackwell", "flash1"): (190, 150),
    ("blackwell", "flash2"): (350, 300),
    ("blackwell", "flash3"): (1150, 900),
    **{("cpu", kernel): (0.5, 0.5) for kernel in ("flash1", "flash2", "flash3")},  # relative to the matmul rate
}
REFERENCE = {"ampere": 271.2, "hopper": 794.5, "blackwell": 1745.0, "cpu": 1.0}  # matmul TFLOP/s of the GPUs above
HALF_RATE_LENGTH = 500.0  # tokens at which causal flash attention has half of its long-sequence rate (same figures)
HEAD_64 = 0.85  # rate with heads of 64 relative to heads of 128 (same figures)


def matmul_rate(gpu: Gpu, precision: Precision, c: Calibration) -> float:
    """FLOP/s of large matmuls inside a training step."""
    share = {"ampere": c.matmul_ampere, "cpu": 1.0}.get(gpu.generation, c.matmul_hopper)
    best = gpu.matmul_bf16_tflops if precision == "bf16" else gpu.matmul_fp8_tflops
    assert best is not None, f"{gpu.name} has no fp8"
    return best * 1e12 * share


def alignment(*dims: Array | float) -> Array:
    """The rate of tensor cores relative to aligned operands. Rows must start at multiples of 16 bytes for the wide
    loads (8 elements of 2 bytes); 8-byte alignment halves the rate, and odd sizes fall to a quarter."""
    rate = np.ones(np.broadcast(*dims).shape)
    for dim in dims:
        d = np.asarray(dim)
        rate = np.minimum(rate, np.where(d % 8 == 0, 1.0, np.where(d % 4 == 0, 0.5, np.where(d % 2 == 0, 0.35, 0.25))))
    return rate


def matmul_s(
    gpu: Gpu,
    c: Calibration,
    m: Array,
    n: Array,
    k: Array,
    *,
    batch: Array | float = 1.0,
    precision: Precision = "bf16",
    weight_bytes: float | None = None,
) -> Array:
    """Seconds of `batch` products [m, k] x [k, n]. `weight_bytes` is the size of an element of the second operand, if
    it is stored in fewer bits than it is multiplied in."""
    rate = matmul_rate(gpu, precision, c) / gpu.sms
    m, n, k, batch = np.broadcast_arrays(m, n, k, batch)
    tiles = np.ceil(m / ROWS) * np.ceil(n / COLUMNS) * batch  # [choices, shapes]
    waves = np.ceil(tiles * PARTS / gpu.sms)
    steps = k / PARTS + c.ramp_k * np.where(PARTS == 1, 1.0, 1.5)  # the parts of K are added up at the end
    best = (waves * 2 * ROWS * COLUMNS * steps / (rate * SPEED)).min(axis=0)
    itemsize = 2 if precision == "bf16" else 1
    traffic = batch * (m * k * itemsize + k * n * (weight_bytes or itemsize) + 2 * m * n)
    return np.maximum(best / alignment(n, k), traffic / (gpu.hbm_tb_per_s * 1e12 * c.hbm))


def memory_s(gpu: Gpu, c: Calibration, traffic: Array | float) -> Array:
    """Seconds of kernels that only read and write `traffic` bytes."""
    return np.asarray(traffic) / (gpu.hbm_tb_per_s * 1e12 * c.hbm)


def attention_s(
    gpu: Gpu, kernel: AttentionKernel, flops: Array, length: Array | float, head_dim: float
) -> tuple[Array, Array]:
    """Seconds of the forward and the backward of flash attention. `flops` are those of the forward, of the scores that
    are needed; the backward has 2.5 times as many. `length` is the number of keys of one call."""
    forward, backward = FLASH[gpu.generation, kernel]
    scale = gpu.matmul_bf16_tflops / REFERENCE[gpu.generation]
    size = np.where(head_dim >= 128, 1.0, HEAD_64)
    ramp = np.asarray(length) / (np.asarray(length) + HALF_RATE_LENGTH)
    rate = 1e12 * scale * size * ramp
    return flops / (forward * rate), 2.5 * flops / (backward * rate)


def unfused_attention_s(
    gpu: Gpu, c: Calibration, sequences: Array, heads: Array, length: float, head_dim: float
) -> tuple[Array, Array]:
    """Seconds of forward and backward of attention that writes its scores: two batched matmuls over the full square and
    a fused scale-mask-softmax, with dropout, as in Megatron-LM before FlashAttention.

    The fused softmax needs a multiple of 4 of (sequences · heads); else scale, mask, softmax and casts are separate.
    """
    batch = sequences * heads
    ones = np.ones_like(batch)
    scores = matmul_s(gpu, c, ones * length, ones * length, ones * head_dim, batch=batch)
    values = matmul_s(gpu, c, ones * length, ones * head_dim, ones * length, batch=batch)
    square = batch * length * length
    fused = batch % 4 == 0
    forward = scores + values + memory_s(gpu, c, square * np.where(fused, 4 + 5, 24 + 5))
    backward = 2 * (scores + values) + memory_s(gpu, c, square * np.where(fused, 6 + 5, 20 + 5))
    return forward, backward
