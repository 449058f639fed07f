"""The roofline: the minimum time of a call on a machine with measured ceilings.

The predicted time of a call is the larger of bytes / copy bandwidth and FLOPs / matmul rate; the larger one is its
bound. The fraction of the ceiling is the predicted time over the measured time. Copy is the reference because most ops
read about as much as they write, and because one reference makes ops comparable.

A stricter limit decides whether a result is plausible: the bandwidth at the call's own ratio of reads and writes. A
loss that only reads can exceed the copy bandwidth, but not the read bandwidth.
"""

from dataclasses import dataclass, replace

import torch

from bagu.machine.ceilings import Ceilings
from bagu.ops.contract.core import Cost, OpSpec
from bagu.ops.contract.signature import Dims, sizes

FAULT = 1.03  # a result above its limit by this factor is a measurement fault
PASSES = ("fwd", "bwd", "fwd+bwd")


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The minimum time, and its bound: "copy" (memory-bound) or "matmul" (compute-bound)."""

    seconds: float
    ceiling: str

    @property
    def bound(self) -> str:
        return "memory" if self.ceiling == "copy" else "compute"


def costs(spec: OpSpec, dims: Dims, first: torch.dtype) -> dict[str, Cost]:
    """The cost of each pass at these dims; an op without gradients has only the forward."""
    numbers, itemsize = sizes(dims), first.itemsize
    found = {"fwd": spec.cost(numbers, itemsize)}
    if spec.grads and spec.cost_backward is not None:
        found["bwd"] = spec.cost_backward(numbers, itemsize)
        found["fwd+bwd"] = Cost(*(a + b for a, b in zip(found["fwd"], found["bwd"], strict=True)))
    return found


def floor(cost: Cost, ceilings: Ceilings) -> Floor:
    memory_s, compute_s = cost.bytes / ceilings.copy, cost.flops / ceilings.matmul
    if memory_s >= compute_s:
        return Floor(seconds=memory_s, ceiling="copy")
    return Floor(seconds=compute_s, ceiling="matmul")


def bandwidth(ceilings: Ceilings, written: float) -> float:
    """The maximum bytes/s if the fraction `written` of the traffic is writes.

    The time per byte is interpolated between the three measured ones: all reads, half and half, all writes.
    """
    read_s, copy_s, write_s = 1 / ceilings.read, 1 / ceilings.copy, 1 / ceilings.write
    if written <= 0.5:
        return 1 / (read_s + (copy_s - read_s) * 2 * written)
    return 1 / (copy_s + (write_s - copy_s) * (2 * written - 1))


def is_fault(cost: Cost, *, written: int, seconds: float, ceilings: Ceilings, cached: int = 0) -> bool:
    """Whether `seconds` is too short to be plausible.

    `written` of the cost's bytes are writes. `cached` bytes may have come from a cache: a backward right after its
    forward finds there the data that the forward used last.
    """
    rate = bandwidth(ceilings, min(1.0, written / cost.bytes))
    least = max(max(0, cost.bytes - cached) / rate, cost.flops / ceilings.matmul)
    return least > FAULT * seconds


def higher(a: Ceilings, b: Ceilings) -> Ceilings:
    """The maximum of two measurements of each ceiling: noise can only lower a ceiling."""
    return replace(
        a,
        read=max(a.read, b.read),
        write=max(a.write, b.write),
        copy=max(a.copy, b.copy),
        matmul=max(a.matmul, b.matmul),
    )
