"""A cluster: one kind of GPU, the NVLink domain, and the network. Presets by GPU name; other clusters are JSON files.

    {"gpu": "h100", "gpus_per_node": 8, "network_gb_per_s": 25}

`gpu` is the name of a preset or an object with the fields of `Gpu`; every other field is one of `Cluster`. Fields that
are left out come from the preset of that GPU. GB are 10^9 bytes.
"""

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from bagu.config import ConfigError, from_dict
from bagu.errors import UnknownName

Generation = Literal["ampere", "hopper", "blackwell", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peak rates are the vendor's, dense. `matmul_*` are the best rates measured over many shapes (ml-engineering,
    compute/accelerator, "Maximum Achievable Matmul FLOPS"): the shape curves in kernels.py are relative to them."""

    name: str
    generation: Generation
    memory_gib: float
    hbm_tb_per_s: float
    sms: int
    peak_bf16_tflops: float
    matmul_bf16_tflops: float
    matmul_fp8_tflops: float | None = None  # None: no fp8
    usd_per_hour: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Link rates are per GPU and per direction. `nvlink_gb_per_s` and `nvls_gb_per_s` are measured all-reduce bus
    bandwidths of a full node, with a ring and with reduction in the switch."""

    gpu: Gpu
    gpus_per_node: int  # GPUs in one NVLink domain
    nvlink_gb_per_s: float
    nvls_gb_per_s: float | None = None
    network_gb_per_s: float  # the share of the node's network cards that one GPU has
    nvlink_latency_us: float = 3.4
    network_latency_us: float = 14.0  # NCCL's own model of a ring step over the network; 3.4 over NVLink
    pod_gpus: int | None = None  # GPUs under one non-blocking network; None: the whole cluster
    pod_oversubscription: float = 1.0  # between pods: rate inside a pod / rate between pods

    def __post_init__(self) -> None:
        for field in ("gpus_per_node", "nvlink_gb_per_s", "network_gb_per_s", "pod_oversubscription"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} = {getattr(self, field)}; expected more than 0")


# Measured bus bandwidths: ml-engineering, network/README (A100 235; H200 365.6 ring, 473.1 NVLS; B200 682.2, 838.0).
_A100 = Gpu(
    name="a100",
    generation="ampere",
    memory_gib=80,
    hbm_tb_per_s=2.0,
    sms=108,
    peak_bf16_tflops=312,
    matmul_bf16_tflops=271.2,
    usd_per_hour=1.8,
)
_H100 = Gpu(
    name="h100",
    generation="hopper",
    memory_gib=80,
    hbm_tb_per_s=3.35,
    sms=132,
    peak_bf16_tflops=989,
    matmul_bf16_tflops=794.5,
    matmul_fp8_tflops=1402.6,
    usd_per_hour=3.0,
)
_H200 = replace(
    _H100, name="h200", memory_gib=141e9 / 2**30, hbm_tb_per_s=4.8, matmul_fp8_tflops=1453.4, usd_per_hour=3.5
)
_B200 = Gpu(
    name="b200",
    generation="blackwell",
    memory_gib=180e9 / 2**30,
    hbm_tb_per_s=8.0,
    sms=148,
    peak_bf16_tflops=2250,
    matmul_bf16_tflops=1745,
    matmul_fp8_tflops=3432.5,
    usd_per_hour=5.0,
)
# Peak rates and bandwidths: NVIDIA's data sheets (A100 40 GB, L40S) and Ada whitepaper (RTX 4090, fp32 accumulation).
# No published table of matmul rates has them: the share of the peak is the A100's (271.2 / 312). Kernels of sm_89 are
# those of Ampere. Both have PCIe 4.0 x16 and no NVLink; 4090s copy through the host (about 12 GB/s a direction).
_A100_40 = replace(_A100, name="a100-40gb", memory_gib=40, hbm_tb_per_s=1.555, usd_per_hour=1.3)
_L40S = Gpu(
    name="l40s",
    generation="ampere",
    memory_gib=48,
    hbm_tb_per_s=0.864,
    sms=142,
    peak_bf16_tflops=362,
    matmul_bf16_tflops=315,
    matmul_fp8_tflops=637,
    usd_per_hour=1.0,
)
_4090 = Gpu(
    name="4090",
    generation="ampere",
    memory_gib=24,
    hbm_tb_per_s=1.008,
    sms=128,
    peak_bf16_tflops=165.2,
    matmul_bf16_tflops=143.6,
    matmul_fp8_tflops=287.1,
    usd_per_hour=0.4,
)
CLUSTERS: dict[str, Cluster] = {
    "a100": Cluster(gpu=_A100, gpus_per_node=8, nvlink_gb_per_s=235, network_gb_per_s=25),
    "h100": Cluster(gpu=_H100, gpus_per_node=8, nvlink_gb_per_s=365.6, nvls_gb_per_s=473.1, network_gb_per_s=50),
    "h200": Cluster(gpu=_H200, gpus_per_node=8, nvlink_gb_per_s=365.6, nvls_gb_per_s=473.1, network_gb_per_s=50),
    "b200": Cluster(gpu=_B200, gpus_per_node=8, nvlink_gb_per_s=682.2, nvls_gb_per_s=838.0, network_gb_per_s=50),
    "a100-40gb": Cluster(gpu=_A100_40, gpus_per_node=8, nvlink_gb_per_s=235, network_gb_per_s=25),
    "l40s": Cluster(gpu=_L40S, gpus_per_node=8, nvlink_gb_per_s=20, network_gb_per_s=12.5),
    "4090": Cluster(gpu=_4090, gpus_per_node=8, nvlink_gb_per_s=12, network_gb_per_s=3.1),
}
GPUS: dict[str, Gpu] = {name: cluster.gpu for name, cluster in CLUSTERS.items()}
ALIASES = {"a100-80gb": "a100", "h100-80gb": "h100", "a100-40g": "a100-40gb", "a100-80g": "a100", "h200-141gb": "h200"}


def cluster_of(name: str) -> Cluster:
    """The preset of a GPU, or the cluster described by a JSON file."""
    if name.endswith(".json"):
        return read_cluster(Path(name))
    plain = re.sub(r"^(nvidia|geforce|rtx|-)+|-(sxm\d?|pcie)", "", name.lower().replace("_", "-").replace(" ", "-"))
    plain = ALIASES.get(plain, plain)
    UnknownName.check("GPU", plain, CLUSTERS)
    return CLUSTERS[plain]


def read_cluster(path: Path) -> Cluster:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint="see `bagu plan --help` for an example") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}; expected an object", hint='{"gpu": "h100", …}')
    return from_dict(Cluster, _with_preset(data, path), str(path))


def _with_preset(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """`data` with the fields of the preset it names by `gpu`; a described GPU has no preset to take fields from."""
    if "gpu" not in data:
        raise ConfigError(f"{path}: gpu: has no default and is not set", hint=f"one of {', '.join(GPUS)}, or an object")
    if not isinstance(data["gpu"], str):
        return data
    preset = cluster_of(data["gpu"])
    known = {field.name: getattr(preset, field.name) for field in fields(Cluster)}
    return {**known, **data, "gpu": asdict(preset.gpu)}
