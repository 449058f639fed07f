"""The state of each GPU as NVML reports it, and how the GPUs are connected.

`nvml` fills these; `diagnose` and `render` read them; tests build them by hand.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NvLink:
    """One link. `remote` is "GPU", "switch", "CPU" or None; `remote_bus` is the PCI address of the remote end."""

    link: int
    active: bool
    version: int | None
    speed_mb_s: int | None
    remote: str | None
    remote_bus: str | None


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """The current state of one GPU; `index` is the driver's index, as in `nvidia-smi`."""

    index: int
    name: str | None
    bus: str | None
    capability: tuple[int, int] | None
    memory_bytes: int | None
    memory_free_bytes: int | None
    sm_mhz: int | None
    sm_max_mhz: int | None
    mem_mhz: int | None
    mem_max_mhz: int | None
    temperature_c: int | None
    power_w: float | None
    power_limit_w: float | None
    throttle: tuple[str, ...] | None
    pcie_gen: int | None
    pcie_width: int | None
    pcie_max_width: int | None
    ecc_corrected: int | None  # since the driver was loaded
    ecc_uncorrected: int | None
    remap_pending: bool | None  # HBM rows are remapped at the next reset
    remap_failed: bool | None  # no spare row was left
    cpu_affinity: str | None
    nvlinks: tuple[NvLink, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NvmlState:
    """`topology[i][j]` is the cell of `nvidia-smi topo -m`: X, NV#, PIX, PXB, PHB, NODE, SYS, or None."""

    gpus: tuple[GpuState, ...]
    topology: tuple[tuple[str | None, ...], ...]


def nvlink_width(a: GpuState, b: GpuState, peers: bool | None) -> int:
    """The number in the NV# of a pair: direct links from a to b, or the links that both have to switches.

    If the remote end is hidden (in a virtual machine), links count if the driver reports the pair as NVLink `peers`.
    """
    direct = sum(link.active and b.bus is not None and link.remote_bus == b.bus for link in a.nvlinks)
    if direct:
        return direct

    def up(gpu: GpuState, *remotes: str | None) -> int:
        return sum(link.active and link.remote in remotes for link in gpu.nvlinks)

    if peers is False:
        return 0
    switched = min(up(a, "switch"), up(b, "switch"))
    return switched or (min(up(a, "switch", None), up(b, "switch", None)) if peers else 0)


def topology(
    gpus: Sequence[GpuState], common: Callable[[int, int], str | None], peers: Callable[[int, int], bool | None]
) -> tuple[tuple[str | None, ...], ...]:
    """The matrix of `nvidia-smi topo -m`: NV# for a pair with NVLink, else the level where the PCI paths join."""

    def cell(i: int, j: int) -> str | None:
        if i == j:
            return "X"
        width = nvlink_width(gpus[i], gpus[j], peers(i, j))
        return f"NV{width}" if width else common(i, j)

    return tuple(tuple(cell(i, j) for j in range(len(gpus))) for i in range(len(gpus)))
