"""The prediction of a step's time, before anything is measured: a roofline.

    step = OVERHEAD + max(bytes / bandwidth, FLOPs / rate)
    bytes = weights + KV cache of the running sequences       FLOPs = 2 x active parameters x tokens of the step

Bandwidth and rate are those of this machine (machine/ceilings.py). FLOPs scale with the threads, bandwidth does not:
one core can take most of it. Quantized weights have one byte and twice the rate. Speculation and block size are
predicted to change nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bagu.bench.tune.simulate import StepTime
from bagu.bench.tune.space import Point, Value
from bagu.machine.ceilings import measure_ceilings
from bagu.machine.cores import available_cores
from bagu.machine.device import default_device
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import ModelConfig, count

OVERHEAD_S = 1e-3  # planning, sampling and messages of a step in Python


@dataclass(frozen=True, kw_only=True)
class Roofline:
    parameters: int  # active ones
    kv_bytes: int  # of a token
    itemsize: int  # bytes of a weight without quantization
    bandwidth: float  # bytes/s
    rate: float  # FLOP/s with `threads`
    threads: int  # with which the rate was measured; those that a server has by default are one fewer
    overhead_s: float = OVERHEAD_S

    def parts(self, point: Point) -> Callable[[Any, Any, Any], tuple[float, Any, Any]]:
        """A function of (decodes, prompt tokens, KV tokens), numbers or arrays, to seconds: the overhead, the data at
        the bandwidth, the FLOPs at the rate."""
        one: Mapping[str, Value] = dict(point)
        small = one.get("quantization") is not None
        weights = self.parameters * (1 if small else self.itemsize)
        threads = int(one.get("threads") or max(1, self.threads - 1))
        rate = self.rate * min(threads, self.threads) / self.threads * (2 if small else 1)

        def seconds(decodes: Any, prompt: Any, context: Any) -> tuple[float, Any, Any]:
            data = (weights + context * self.kv_bytes) / self.bandwidth
            return self.overhead_s, data, 2 * self.parameters * (decodes + prompt) / rate

        return seconds

    def step_time(self, point: Point) -> StepTime:
        parts = self.parts(point)

        def seconds(decodes: int, prompt: int, context: int) -> float:
            overhead, data, flops = parts(decodes, prompt, context)
            return float(overhead + max(data, flops))

        return seconds


def roofline_of(config: ModelConfig) -> Roofline:
    """Takes about 2 s: the ceilings are measured."""
    device = default_device()
    dtype = compute_dtype(device)
    found = measure_ceilings(device, dtype=dtype, quick=True)
    parameters = count.parameters(config)
    idle = 0 if config.tie_embeddings else parameters.embedding  # a lookup reads one row
    return Roofline(
        parameters=parameters.active - idle,
        kv_bytes=count.kv_bytes(config, itemsize=dtype.itemsize),
        itemsize=dtype.itemsize,
        bandwidth=found.read,
        rate=found.matmul,
        threads=available_cores(),
    )
