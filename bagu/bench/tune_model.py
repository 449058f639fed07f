"""What is known of a set of options before it runs: whether it can run, its least time, and a predicted time.

All three follow from the compiled kernels (registers, shared memory, warps, programs) and the op's FLOPs and bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bagu.bench.occupancy import Occupancy, occupancy
from bagu.machine.ceilings import Ceilings
from bagu.ops.core import Cost

__all__ = ["Build", "Forecast", "Gpu", "Kernel", "forecast", "least_s", "predicted_s", "refusal"]

T = TypeVar("T")

LATENCY_S = 0.8e-6  # of loaded memory on an H200
# Of idle memory: 479 cycles at 1.755 GHz, in arXiv 2402.13499 (an H100). Other GPUs since 2017 take as long or longer.
LEAST_LATENCY_S = 0.27e-6

CEILING_ERROR = 1.1  # ceilings measured in 2 s are too low by up to 7 %: so much faster a matmul ran on an H200


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One compiled kernel of a step."""

    programs: int | None  # the grid; None if it depends on values
    warps: int
    registers: int
    spills: int  # bytes
    shared: int  # bytes


@dataclass(frozen=True, kw_only=True)
class Build:
    """The kernels of a step with one set of options, or the error of the compiler."""

    kernels: tuple[Kernel, ...] = ()
    error: str = ""
    seconds: float = 0.0

    @property
    def summary(self) -> dict[str, int]:
        """The most registers, spills and shared memory of a kernel."""
        facts = ("registers", "spills", "shared")
        return {f: max(getattr(k, f) for k in self.kernels) for f in facts} if self.kernels else {}


@dataclass(frozen=True, kw_only=True)
class Gpu:
    arch: str
    multiprocessors: int
    ceilings: Ceilings


@dataclass(frozen=True, kw_only=True)
class Forecast(Generic[T]):
    """What is known of each candidate before it runs; empty if nothing was compiled."""

    builds: Mapping[T, Build] = field(default_factory=dict)
    refused: Mapping[T, tuple[str, str]] = field(default_factory=dict)  # (status, reason)
    least: Mapping[T, float] = field(default_factory=dict)  # seconds
    predicted: Mapping[T, float | None] = field(default_factory=dict)  # seconds

    def order(self, candidate: T) -> float:
        """The place of a candidate in a search: the predicted time, unknown ones last."""
        return self.predicted.get(candidate) or math.inf


def forecast(default: T, builds: Mapping[T, Build], cost: Cost | None, gpu: Gpu) -> Forecast[T]:
    """What the compiled kernels say; without a cost there are no times."""
    refused = {c: why for c, build in builds.items() if (why := refusal(build, builds[default], gpu)) is not None}
    timed = {} if cost is None else {c: b for c, b in builds.items() if c not in refused}
    return Forecast(
        builds=builds, refused=refused, least={c: least_s(b, cost, gpu) for c, b in timed.items() if cost},
        predicted={c: predicted_s(b, cost, gpu) for c, b in timed.items() if cost},
    )  # fmt: skip


def refusal(build: Build, default: Build, gpu: Gpu) -> tuple[str, str] | None:
    """(status, reason) if the options cannot run, or spill registers where the defaults do not."""
    if build.error:
        return "compile", build.error
    for kernel in build.kernels:
        found = _occupancy(kernel, gpu)
        if found.programs == 0:
            have = {"registers": f"{kernel.registers} registers in each of {32 * kernel.warps} threads"}
            return "resources", f"no room for {have.get(found.limit, f'{kernel.shared:,} B of shared memory')}"
    spilled = [sum(k.spills for k in b.kernels) for b in (build, default)]
    return ("spills", f"{spilled[0]} B of registers are spilled") if spilled[0] > spilled[1] else None


def least_s(build: Build, cost: Cost, gpu: Gpu) -> float:
    """The roofline of these options: no run is faster.

    Three roofs: bytes over bandwidth, FLOPs over the rate of the matrix units, and latency: a program takes at least
    one access to memory, and a multiprocessor runs no more programs at once than fit.
    """
    c = gpu.ceilings
    roofs = [cost.bytes / max(c.read, c.write, c.copy) / CEILING_ERROR, cost.flops / c.matmul / CEILING_ERROR]
    if all(k.programs is not None for k in build.kernels):
        roofs.append(LEAST_LATENCY_S * sum(math.ceil(_waves(k, gpu)) for k in build.kernels))
    return max(roofs)


def predicted_s(build: Build, cost: Cost, gpu: Gpu) -> float | None:
    """The cost model: bytes x (1 / copy bandwidth + latency / bytes in flight), rounded up to whole waves of programs.

    Bytes in flight follow from the largest kernel: programs per multiprocessor (its occupancy) times the bytes of a
    program, at most its registers (Little's law). None if its grid depends on values.
    """
    if not build.kernels or any(k.programs is None for k in build.kernels):
        return None
    kernel = max(build.kernels, key=lambda k: (k.programs or 0) * k.warps)
    programs = kernel.programs or 1
    resident = min(_occupancy(kernel, gpu).programs, programs / gpu.multiprocessors)
    own = min(cost.bytes / programs, 4 * 32 * kernel.warps * kernel.registers)
    in_flight = gpu.multiprocessors * resident * own
    waves = _waves(kernel, gpu)
    memory_s = cost.bytes * (1 / gpu.ceilings.copy + LATENCY_S / in_flight)
    return max(memory_s, cost.flops / gpu.ceilings.matmul) * (math.ceil(waves) / waves if waves > 1 else 1.0)


def _waves(kernel: Kernel, gpu: Gpu) -> float:
    return (kernel.programs or 0) / (gpu.multiprocessors * _occupancy(kernel, gpu).programs)


def _occupancy(kernel: Kernel, gpu: Gpu) -> Occupancy:
    return occupancy(gpu.arch, registers=kernel.registers, shared=kernel.shared, warps=kernel.warps)
