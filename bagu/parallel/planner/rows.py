"""Published measurements: tables.json holds the rows as printed, with their sources; here they become predictions'
inputs and measured seconds.

The constants in calibration.py are set with the rows of `CALIBRATE` alone. The rows of `JUDGE` only judge.
"""

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from bagu.nn.config import ModelConfig, Rope
from bagu.nn.position_choices import Learned
from bagu.parallel.planner.calibration import CALIBRATION
from bagu.parallel.planner.cluster import CLUSTERS, Cluster
from bagu.parallel.planner.layouts import Layout, Workload
from bagu.parallel.planner.model_cost import model_cost
from bagu.parallel.planner.models import MODELS
from bagu.parallel.planner.software import STACKS, Software

CALIBRATE = ("sc21-table1", "sc21-table2", "korthikanti", "megatron-core", "nanotron")
JUDGE = ("mosaicml", "bloom", "torchtitan", "dgxc", "nanotron-unseen")  # the three torchtitan tables are one source

_A100, _H100, _B200 = CLUSTERS["a100"], CLUSTERS["h100"], CLUSTERS["b200"]
# Jean Zay has four Omni-Path links of 100 Gbit/s for eight GPUs; they reached 135 Gbit/s together in 2022 and still a
# year later (ml-engineering, network/README, Omni-Path). That is a reached rate, so the share is divided out.
_JEAN_ZAY = replace(_A100, network_gb_per_s=135 / 8 / 8 / CALIBRATION.network)
# torchtitan's footnote: 96 GB of HBM2e and 500 W. The rate at a power cap goes with its cube root; six stacks of HBM2e.
_CAPPED = (500 / 700) ** (1 / 3)
PUBLISHED: dict[str, Cluster] = {
    "a100": _A100,
    "a100-40gb": CLUSTERS["a100-40gb"],
    "h100": _H100,
    "h100-500w": replace(
        _H100,
        gpu=replace(
            _H100.gpu,
            name="h100-500w",
            memory_gib=95,
            hbm_tb_per_s=2.4,
            matmul_bf16_tflops=794.5 * _CAPPED,
            matmul_fp8_tflops=1402.6 * _CAPPED,
        ),
    ),
    "gb200": replace(
        _B200,
        gpu=replace(_B200.gpu, name="gb200", memory_gib=173, peak_bf16_tflops=2500, matmul_bf16_tflops=1822),
        gpus_per_node=72,
    ),
    "jean-zay": _JEAN_ZAY,
    "jean-zay-before-02-25": _JEAN_ZAY,  # "PCI-Express/NUMA was improved" on 02-25; the source warns not to compare
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run."""

    source: str
    model: str
    workload: Workload
    cluster_name: str
    software: Software
    layout: Layout
    measured_s: float | None  # seconds per step; None if it ran out of memory
    measured_gb: float | None
    out_of_memory: bool
    date: str

    @property
    def cluster(self) -> Cluster:
        return PUBLISHED[self.cluster_name]

    @property
    def judge(self) -> str | None:
        """The source it counts for; None for a calibration row."""
        return next((name for name in JUDGE if self.source.startswith(name)), None)

    @property
    def tokens_per_s(self) -> float:
        assert self.measured_s is not None
        return self.workload.batch * self.workload.seq / self.measured_s


@functools.cache
def _tables() -> dict[str, Any]:
    text = resources.files("bagu.parallel.planner").joinpath("tables.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def sources() -> dict[str, dict[str, Any]]:
    """Title, addresses and inferred fields of each source."""
    return dict(_tables()["sources"])


def own() -> list[dict[str, Any]]:
    """Rows of bagu's own training benchmark."""
    return list(_tables()["own"])


def left_out() -> list[tuple[str, str]]:
    """(source, reason) of the rows that are not compared."""
    return [(row["source"], row["left_out"]) for row in _tables()["rows"] if "left_out" in row]


@functools.cache
def read_rows() -> tuple[Row, ...]:
    return tuple(_row(row) for row in _tables()["rows"] if "left_out" not in row)


def _row(r: dict[str, Any]) -> Row:
    software = STACKS[r["stack"]]
    if r.get("async_tp"):
        software = replace(software, overlap_tp=True)
    if "stages" in r:
        software = replace(software, stages=r["stages"])
    zero, dp = r.get("zero", 0), r["dp"]
    layout = Layout(
        dp=dp, shard=dp if zero else 1, tp=r["tp"], pp=r["pp"], cp=r.get("cp", 1), ep=r.get("ep", 1), zero=zero,
        sequence_parallel=bool(r.get("sp")), micro_batch=r["mbs"], virtual=r.get("vpp", 1),
        recompute=r.get("recompute", "none"),
    )  # fmt: skip
    workload = Workload(model=_model(r), seq=r["seq"], batch=r["gbs"], precision=r.get("precision", "bf16"))
    return Row(
        source=r["source"],
        model=r["model"],
        workload=workload,
        cluster_name=r["cluster"],
        software=software,
        layout=layout,
        measured_s=_seconds(r, workload),
        measured_gb=_gigabytes(r),
        out_of_memory=bool(r.get("oom")),
        date=r.get("date", ""),
    )


def _gigabytes(r: dict[str, Any]) -> float | None:
    """The measured memory in 10^9 bytes. nanotron divides by 1024^3 (helpers.py, create_table_log)."""
    if "mem_gb" not in r:
        return None
    return float(r["mem_gb"]) * (2**30 / 1e9 if r["source"].startswith("nanotron") else 1.0)


def _model(r: dict[str, Any]) -> ModelConfig:
    if r["model"].startswith("DeepSeek-V3"):
        return MODELS["deepseek-v3"]
    h, heads = r["hidden"], r["heads"]
    gated = r.get("gated", False)
    return ModelConfig(
        vocab_size=r["vocab"],
        hidden_size=h,
        num_layers=r["layers"],
        num_heads=heads,
        num_kv_heads=r.get("kv", heads),
        head_dim=h // heads,
        intermediate_size=r.get("ffn", 4 * h),
        max_len=r["seq"],
        ffn="swiglu" if gated else "gelu",
        positions=Rope() if gated else Learned(),
        tie_embeddings=r.get("tied", not gated),
    )


def _seconds(r: dict[str, Any], workload: Workload) -> float | None:
    """Seconds per step, from what the source prints."""
    tokens = workload.batch * workload.seq
    if "step_s" in r:
        return float(r["step_s"])
    if "tokens_s_gpu" in r:
        return tokens / (float(r["tokens_s_gpu"]) * r["gpus"])
    if r["source"].startswith("nanotron"):  # MFU with the full square of attention
        cost = model_cost(workload.model)
        body = sum(layer.count * layer.linear_flops() for layer in cost.layers) + 2 * cost.head
        flops = 3 * tokens * (body + 4 * workload.model.num_layers * workload.model.hidden_size * workload.seq)
        return flops / (r["mfu"] / 100 * 989e12 * r["gpus"])
    if "tflops_gpu" in r:  # Megatron's formula, with recomputation in SC21 and without in Megatron-Core
        h, L, V, s = r["hidden"], r["layers"], r["vocab"], r["seq"]
        passes = 96 if r["source"].startswith("sc21") else 72
        flops = passes * tokens * L * h * h * (1 + s / (6 * h)) + 6 * tokens * h * V
        return flops / (r["tflops_gpu"] * 1e12 * r["gpus"])
    return None
