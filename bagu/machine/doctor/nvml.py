"""GPU state from NVML: clocks, temperature, power, errors, NVLink, and the topology matrix of `nvidia-smi topo -m`.

`Nvml` wraps the module `pynvml` (distribution nvidia-ml-py); no other file uses it. Each NVML query may fail on its own
("not supported" on consumer cards, in virtual machines, with old drivers): such a field is None. Any other error (such
as a lost GPU) also sets its field to None and is added to `GpuState.problems`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bagu.machine.doctor.gpus import GpuState, NvLink, NvmlState, topology

REFUSALS = ("NotSupported", "NoPermission", "InvalidArgument", "NotFound", "FunctionNotFound")

THROTTLE_REASONS = {  # suffix of nvmlClocksThrottleReason… -> our name
    "GpuIdle": "idle",
    "ApplicationsClocksSetting": "application clocks set",
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SyncBoost": "sync boost",
    "SwThermalSlowdown": "software thermal slowdown",
    "HwThermalSlowdown": "hardware thermal slowdown",
    "HwPowerBrakeSlowdown": "power brake",
    "DisplayClockSetting": "display clocks set",
}

ANCESTORS = {  # suffix of NVML_TOPOLOGY_… -> the name in `nvidia-smi topo -m`
    "INTERNAL": "PIX",  # two GPUs on one board
    "SINGLE": "PIX",
    "MULTIPLE": "PXB",
    "HOSTBRIDGE": "PHB",
    "NODE": "NODE",
    "SYSTEM": "SYS",
}

REMOTES = {"GPU": "GPU", "IBMNPU": "CPU", "SWITCH": "switch"}  # suffix of NVML_NVLINK_DEVICE_TYPE_… -> our name


class Nvml:
    """A context manager that opens and closes NVML through `module`, which is `pynvml` or a compatible module.

    Entering raises `module.NVMLError` if there is no driver.
    """

    def __init__(self, module: Any) -> None:
        self.module = module

    def __enter__(self) -> Nvml:
        self.module.nvmlInit()
        return self

    def __exit__(self, *exception: object) -> None:
        self.module.nvmlShutdown()

    def state(self) -> NvmlState:
        m = self.module
        handles, gpus = [], []
        for index in range(m.nvmlDeviceGetCount()):
            problems: list[str] = []
            handle = self._ask(problems, m.nvmlDeviceGetHandleByIndex, index)
            handles.append(handle)
            gpus.append(self._gpu(index, handle, problems))

        def common(i: int, j: int) -> str | None:
            level = self._pair(m.nvmlDeviceGetTopologyCommonAncestor, handles[i], handles[j])
            return next((word for suffix, word in ANCESTORS.items() if level == self._topology_level(suffix)), None)

        def peers(i: int, j: int) -> bool | None:
            status = self._pair(m.nvmlDeviceGetP2PStatus, handles[i], handles[j], m.NVML_P2P_CAPS_INDEX_NVLINK)
            return None if status is None else status == m.NVML_P2P_STATUS_OK

        return NvmlState(gpus=tuple(gpus), topology=topology(gpus, common, peers))

    def _gpu(self, index: int, handle: Any, problems: list[str]) -> GpuState:
        m = self.module

        def ask(question: Callable[..., Any], *args: Any) -> Any:
            return None if handle is None else self._ask(problems, question, handle, *args)

        memory = ask(m.nvmlDeviceGetMemoryInfo)
        power, limit = ask(m.nvmlDeviceGetPowerUsage), ask(m.nvmlDeviceGetEnforcedPowerLimit)  # milliwatts
        remapped = ask(m.nvmlDeviceGetRemappedRows)  # corrected, uncorrected, pending, failed
        ecc = [
            ask(m.nvmlDeviceGetTotalEccErrors, kind, m.NVML_VOLATILE_ECC)
            for kind in (m.NVML_MEMORY_ERROR_TYPE_CORRECTED, m.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        ]
        return GpuState(
            index=index,
            name=_text(ask(m.nvmlDeviceGetName)),
            bus=_bus(ask(m.nvmlDeviceGetPciInfo)),
            capability=ask(m.nvmlDeviceGetCudaComputeCapability),
            memory_bytes=None if memory is None else memory.total,
            memory_free_bytes=None if memory is None else memory.free,
            sm_mhz=ask(m.nvmlDeviceGetClockInfo, m.NVML_CLOCK_SM),
            sm_max_mhz=ask(m.nvmlDeviceGetMaxClockInfo, m.NVML_CLOCK_SM),
            mem_mhz=ask(m.nvmlDeviceGetClockInfo, m.NVML_CLOCK_MEM),
            mem_max_mhz=ask(m.nvmlDeviceGetMaxClockInfo, m.NVML_CLOCK_MEM),
            temperature_c=ask(m.nvmlDeviceGetTemperature, m.NVML_TEMPERATURE_GPU),
            power_w=None if power is None else power / 1e3,
            power_limit_w=None if limit is None else limit / 1e3,
            throttle=self._throttle(ask(m.nvmlDeviceGetCurrentClocksThrottleReasons)),
            pcie_gen=ask(m.nvmlDeviceGetCurrPcieLinkGeneration),
            pcie_width=ask(m.nvmlDeviceGetCurrPcieLinkWidth),
            pcie_max_width=ask(m.nvmlDeviceGetMaxPcieLinkWidth),
            ecc_corrected=ecc[0],
            ecc_uncorrected=ecc[1],
            remap_pending=None if remapped is None else bool(remapped[2]),
            remap_failed=None if remapped is None else bool(remapped[3]),
            cpu_affinity=_ranges(ask(m.nvmlDeviceGetCpuAffinity, 16)),  # 16 words of 64 bits: 1024 CPUs
            nvlinks=self._nvlinks(ask),
            problems=tuple(dict.fromkeys(problems)),
        )

    def _nvlinks(self, ask: Callable[..., Any]) -> tuple[NvLink, ...]:
        m = self.module
        kinds = {getattr(m, f"NVML_NVLINK_DEVICE_TYPE_{suffix}"): word for suffix, word in REMOTES.items()}
        links = []
        for link in range(m.NVML_NVLINK_MAX_LINKS):
            active = ask(m.nvmlDeviceGetNvLinkState, link)
            if active is None:  # no more links on this GPU
                break
            links.append(
                NvLink(
                    link=link,
                    active=bool(active),
                    version=ask(m.nvmlDeviceGetNvLinkVersion, link) if active else None,
                    speed_mb_s=self._speed(ask, link) if active else None,
                    remote=kinds.get(ask(m.nvmlDeviceGetNvLinkRemoteDeviceType, link)) if active else None,
                    remote_bus=_bus(ask(m.nvmlDeviceGetNvLinkRemotePciInfo, link)) if active else None,
                )
            )
        return tuple(links)

    def _speed(self, ask: Callable[..., Any], link: int) -> int | None:
        """MB/s of one link in one direction, as in `nvidia-smi nvlink --status`."""
        fields = ask(self.module.nvmlDeviceGetFieldValues, [(self.module.NVML_FI_DEV_NVLINK_GET_SPEED, link)])
        if fields is None or fields[0].nvmlReturn != self.module.NVML_SUCCESS:
            return None
        return int(fields[0].value.uiVal)

    def _throttle(self, bits: int | None) -> tuple[str, ...] | None:
        if bits is None:
            return None
        words = []
        for suffix, word in THROTTLE_REASONS.items():
            bit = getattr(self.module, f"nvmlClocksThrottleReason{suffix}")
            if bits & bit:
                words.append(word)
                bits &= ~bit
        return (*words, f"reason {bits:#x}") if bits else tuple(words)  # a newer driver may report more reasons

    def _topology_level(self, suffix: str) -> int:
        return int(getattr(self.module, f"NVML_TOPOLOGY_{suffix}"))

    def _pair(self, question: Callable[..., Any], a: Any, b: Any, *args: Any) -> Any:
        return None if a is None or b is None else self._ask([], question, a, b, *args)

    def _ask(self, problems: list[str], question: Callable[..., Any], *args: Any) -> Any:
        """The answer; None if not supported; None and a line in `problems` for any other NVML error."""
        try:
            return question(*args)
        except self.module.NVMLError as error:
            if type(error).__name__ not in {f"NVMLError_{kind}" for kind in REFUSALS}:
                problems.append(f"{question.__name__}: {error}")
            return None


def _text(value: str | bytes | None) -> str | None:
    return value.decode() if isinstance(value, bytes) else value  # some versions of pynvml return bytes


def _bus(info: Any) -> str | None:
    """The PCI address; NVML reports a hidden remote end as an empty or all-ones address."""
    text = None if info is None else (_text(info.busId) or "").lower()
    return text if text and not text.startswith("ffff") else None


def _ranges(words: Sequence[int] | None) -> str | None:
    """A CPU mask as `nvidia-smi topo -m` prints it: "0-47,96-143"."""
    if words is None:
        return None
    cpus = [64 * w + bit for w, word in enumerate(words) for bit in range(64) if word >> bit & 1]
    starts = [cpu for cpu in cpus if cpu - 1 not in set(cpus)]
    ends = [cpu for cpu in cpus if cpu + 1 not in set(cpus)]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) or None
