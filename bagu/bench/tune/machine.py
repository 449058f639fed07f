"""The roofline of a model on this machine, from its counts and the measured ceilings."""

from __future__ import annotations

from bagu.bench.tune.roofline import Roofline
from bagu.machine.ceilings import measure_ceilings
from bagu.machine.cores import available_cores
from bagu.machine.device import default_device
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import count
from bagu.nn.config import ModelConfig


def roofline_of(config: ModelConfig) -> Roofline:
    """Takes about 2 s: the ceilings are measured."""
    device = default_device()
    dtype = compute_dtype(device)
    found = measure_ceilings(device, dtype=dtype, quick=True)
    parameters = count.parameters(config)
    idle = 0 if config.tie_embeddings else parameters.embedding  # a lookup reads one row
    return Roofline(
        parameters=parameters.active - idle, kv_bytes=count.kv_bytes(config, itemsize=dtype.itemsize),
        itemsize=dtype.itemsize, bandwidth=found.read, rate=found.matmul, threads=available_cores(),
    )  # fmt: skip
